"""What is said about plans: reports, the command line, window memory, the calibration's fit."""

import json
import re

import numpy as np
import pytest
from transformers import CONFIG_MAPPING

from harts_hf import cli
from harts_hf.calibration import Measurement, calibration_trees, fit
from harts_hf.planning.microbatches import plan_step
from harts_hf.planning.report import describe_plan, format_table
from harts_hf.planning.window_memory import SOFTMAX_WIDTH, WindowMemory
from harts_hf.tree import PrefixTree


def sequences():
    prompt = list(range(20))
    return [[*prompt, 100 + k, *range(200 + 9 * k, 209 + 9 * k)] for k in range(12)]


def test_report_states_what_was_measured():
    tree = PrefixTree.from_sequences(sequences())
    record = describe_plan(plan_step(tree, 40, 2, windows=True), tree.num_rows, plan_seconds=0.5)
    assert record["objective"] == "slot_critical" and record["cost"] == "rows"
    assert record["expanded_tokens"] == 12 * 30 and record["step_minimum_rows"] == 140
    assert record["compact_rows"] == 140 + record["producer_rows"] - 20, "each further producer repeats the prompt"
    assert record["compression"] == 360 / record["compact_rows"]
    assert record["slot_critical_rows"] >= record["replica_critical_rows"] >= record["compact_rows"] / 2
    assert json.loads(json.dumps(record)) == record
    table = format_table({"a": record, "b": record})
    assert len({len(line) for line in table.splitlines()}) == 1 and "balance p5" in table


@pytest.mark.parametrize("suffix", [".jsonl", ".npz"])
def test_plan_command(tmp_path, capsys, suffix):
    path = tmp_path / f"rollouts{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps({"input_ids": s}) + "\n" for s in sequences()))
    else:
        np.savez(path, tokens=np.concatenate(sequences()), offsets=np.arange(13) * 30)
    written = tmp_path / "plan.json"
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    picture = tmp_path / "plan.png"
    options = ["--max-tokens", "40", "--replicas", "2", "--json", str(written), "--picture", str(picture)]
    cli.main(["plan", str(path), *options])
    assert "12 trajectories, 360 tokens" in capsys.readouterr().out
    plans = json.loads(written.read_text())["plans"]
    assert plans["with windows"]["slot_critical_rows"] < plans["without windows"]["slot_critical_rows"]
    assert picture.stat().st_size > 0


def test_turns_are_prefixes(tmp_path):
    path = tmp_path / "rollouts.npz"
    turns = {"turn_ptr": [0, 2, 3], "turn_end": [3, 5, 4]}
    np.savez(path, tokens=np.arange(9), offsets=[0, 5, 9], **turns)
    read = cli.read_rollouts(path, "turns")
    assert [s.tolist() for s in read] == [[0, 1, 2], [0, 1, 2, 3, 4], [5, 6, 7, 8]]


def test_plan_command_reads_a_calibration(tmp_path, capsys):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(json.dumps({"input_ids": s}) + "\n" for s in sequences()))
    calibration = tmp_path / "calibration.json"
    cost = {"row": 1.0, "pair": 0.01, "replay": 0.2, "chunk_size": 64}
    calibration.write_text(json.dumps({"cost_model": cost, "device": "test"}))
    cli.main(["plan", str(path), "--max-tokens", "40", "--calibration", str(calibration)])
    assert "1 rows + 0.01 visible pairs + 0.2 replayed rows" in capsys.readouterr().out


def test_window_memory_of_known_configs():
    """Bytes written out by hand from the layers' shapes."""
    size = {"num_hidden_layers": 4, "hidden_size": 32}
    hybrid = ["linear_attention"] * 3 + ["full_attention"]
    kda = {"linear_num_heads": 2, "linear_head_dim": 8}
    kda |= {"num_attention_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}
    config = CONFIG_MAPPING["kimi_linear"](**size, **kda, layer_types=hybrid, linear_conv_kernel_dim=4)
    memory = WindowMemory.from_config(config, max_bytes=10**6)
    handed_over = 1 * 4 * (8 + 4 + 10) * (2 + 4) + 2 * (4 + 4)
    assert memory.row_bytes == handed_over + (4 + 2) * 32 * 2 + 4 + (8 + 4 + 4) * 8
    replayed = 63 * (3 * 16 + 2)  # k, v, g and beta
    assert memory.boundary_bytes == 32 * (2 + 4) + 3 * (2 * 8 * 8 * (4 + 4) + (3 * 3 * 16 + replayed) * (2 + 4))
    assert memory.window_bytes(memory.max_prefix_tokens) <= 10**6 < memory.window_bytes(memory.max_prefix_tokens + 1)

    softmax = CONFIG_MAPPING["qwen3"](**size, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    memory = WindowMemory.from_config(softmax, max_bytes=10**6, checkpoints=False)
    cosines_and_sines = 2 * 8 * 2
    assert memory.row_bytes == 4 * (2 * 2 * 8) * (2 + 4) + 16 + cosines_and_sines + 8 * 8
    assert memory.boundary_bytes == 32 * (2 + 4)
    for model_type in SOFTMAX_WIDTH:
        assert WindowMemory.from_config(CONFIG_MAPPING[model_type](), 2**33).max_prefix_tokens > 1000
    with pytest.raises(ValueError, match="no window memory for model type 'gpt2'"):
        WindowMemory.from_config(CONFIG_MAPPING["gpt2"](), 1)


def test_calibration_recovers_known_coefficients():
    fixed, row, pair, replay = 0.01, 2e-6, 3e-10, 4e-7
    measurements = []
    for trajectories in calibration_trees(4096, vocab_size=1000):
        tree = PrefixTree.from_sequences(trajectories)
        replayed = int((tree.sorted_lcp % 64).sum())
        pairs = int((tree.position_ids + 1).sum())
        seconds = fixed + row * tree.num_rows + pair * pairs + replay * replayed
        measurements.append(Measurement(tree.num_rows, pairs, replayed, seconds))
    assert np.allclose(fit(measurements)[:4], (fixed, row, pair, replay), rtol=1e-6)
    without = [
        Measurement(m.rows, m.pairs, m.replay_rows, 0.01 + row * m.rows - 1e-7 * m.replay_rows) for m in measurements
    ]
    assert min(fit(without)[:4]) >= 0


@pytest.mark.parametrize(
    "lines, options, message",
    [
        ('{"input_ids": [1, 2]}\n{"messages": []}', [], r"line 2: expected .* found \['messages'\]"),
        ('{"input_ids": [1, 2]', [], "line 1: Expecting"),
        ('{"input_ids": [1, 2.5]}', [], "line 1: input_ids must be a list of integers"),
        ('{"input_ids": [[1], [2, 3]]}', [], "line 1: input_ids must be a list of integers"),
        ('{"input_ids": "abc"}', [], "line 1: input_ids must be a list of integers"),
        ('{"input_ids": [1, 2]}', ["--window-gib", "1"], "--window-gib needs --model"),
        ('{"input_ids": [1, 2]}', ["--max-tokens", "-5"], "max_tokens must be at least 1"),
        ('{"input_ids": [1, 2]}', ["--samples", "turns"], "needs an .npz file"),
        (None, [], "No such file"),
    ],
)
def test_what_cannot_be_planned_is_one_line(tmp_path, capsys, lines, options, message):
    path = tmp_path / "rollouts.jsonl"
    if lines is not None:
        path.write_text(lines)
    with pytest.raises(SystemExit):
        cli.main(["plan", str(path), *options])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"offsets": None}, "no array offsets"),
        ({"turn_ptr": None}, "no array turn_ptr"),
        ({"offsets": [0, 5, 20]}, "offsets: must rise from 0 to 9"),
        ({"offsets": [2, 5, 9]}, "offsets: must rise from 0 to 9"),
        ({"offsets": [0, 5]}, "offsets: must rise from 0 to 9"),
        ({"turn_ptr": [0, 3]}, "end within each"),
        ({"turn_end": [3, 6, 4]}, "end within each"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path, capsys, changes, message):
    """A slice would drop tokens, or take those of the next trajectory, without a word."""
    arrays = {"tokens": np.arange(9), "offsets": [0, 5, 9], "turn_ptr": [0, 2, 3], "turn_end": [3, 5, 4], **changes}
    np.savez(tmp_path / "rollouts.npz", **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(SystemExit):
        cli.main(["plan", str(tmp_path / "rollouts.npz"), "--samples", "turns"])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("record", [{"row": 1.0}, {"cost_model": {"rows": 1.0}}, [1.0]])
def test_a_file_without_a_cost_model_is_named(tmp_path, capsys, record):
    (tmp_path / "rollouts.jsonl").write_text('{"input_ids": [1, 2]}')
    (tmp_path / "costs.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit):
        cli.main(["plan", str(tmp_path / "rollouts.jsonl"), "--calibration", str(tmp_path / "costs.json")])
    assert re.search("costs.json: expected the output of", capsys.readouterr().err)
