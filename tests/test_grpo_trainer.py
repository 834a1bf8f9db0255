"""One step of TreeGRPOTrainer is one step of GRPOTrainer: loss, gradients and every metric, for each of TRL's options.

Every case runs two optimizer steps on the same completions (`num_iterations=2`), so that ratios leave 1 in the second:
on policy, most losses have the same gradient. The stock trainer under another padding gives the noise that a correct
implementation may show.
"""

import pytest
import torch
from datasets import Dataset
from grpo_runs import Rollouts, gradient_error, metric_errors, parameter_error, save_checkpoint, train
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.extras.profiling import ProfilingContext

import harts_hf.trainers.step_planner as step_planner
from harts_hf import PrefixTree, TreeGRPOConfig, TreeGRPOTrainer, UnsupportedModelError
from harts_hf.batch import CompactBatch
from harts_hf.planning.plan import Microbatch, StepPlan

OFF_POLICY = {"num_iterations": 2, "max_steps": 2, "epsilon": 0.01, "learning_rate": 0.3}
UNEVEN = ((3,), (0, 5), (1,), (6,), (2,), (7,), (4,))  # 7 microbatches across both stock micro-batches

CASES = {
    "grpo": {"loss_type": "grpo"},
    "grpo delta": {"loss_type": "grpo", "delta": 1.05},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.01},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "luspo sequence": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "grpo sequence beta": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1},
    "dapo beta bias-corrected": {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True},
    "entropy quantile": {"loss_type": "grpo", "top_entropy_quantile": 0.4},
    "entropy bonus": {"loss_type": "dapo", "entropy_coef": 0.05},
    "adaptive entropy": {
        "loss_type": "bnpo",
        "use_adaptive_entropy": True,
        "entropy_coef": 0.05,
        "entropy_target": 9.0,
    },
    "entropy quantile and bonus": {"loss_type": "bnpo", "top_entropy_quantile": 0.5, "entropy_coef": 0.05},
    "off-policy mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.01},
    "mask truncated": {"loss_type": "dapo", "mask_truncated_completions": True},
    "router aux": {"loss_type": "grpo", "router_aux_loss_coef": 0.1},
    "temperature": {"loss_type": "grpo", "temperature": 0.7},
    "two prompts per step": {"loss_type": "grpo", "steps_per_generation": 4, "num_iterations": 1},
    "reentrant checkpointing": {
        "loss_type": "grpo",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "sharing_windows": False,
    },
    "checkpointing": {
        "loss_type": "grpo",
        "router_aux_loss_coef": 0.1,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
}


class OtherPadding(GRPOTrainer):
    """The stock trainer whose old and reference log-probs are computed under other padding than the policy's.

    Stock computes old and new log-probs in batches of one shape, so their rounding cancels in the ratio. Two forwards
    over different trees have independent rounding, as these have.
    """

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **options
    ):
        if batch_size is not None:
            input_ids = torch.nn.functional.pad(input_ids, (13, 0))
            attention_mask = torch.nn.functional.pad(attention_mask, (13, 0))
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size, **options
        )


PLANS = {"one microbatch": None, "seven microbatches": UNEVEN, "windows": None}
WINDOW_ROWS = 50  # trajectories have up to 107 tokens: windows inside of windows, hand-offs within a completion


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def stock_runs(checkpoint, tmp_path_factory):
    """Stock runs and their noise, once per case."""
    done = {}

    def get(name):
        if name not in done:
            options, rollouts = case_options(name), case_rollouts(name)
            folder = tmp_path_factory.mktemp("stock")
            stock = train(GRPOTrainer, checkpoint, folder, rollouts, **options)
            other = train(OtherPadding, checkpoint, folder, rollouts, **options, pad_to_multiple_of=64)
            done[name] = (stock, other)
        return done[name]

    return get


def case_options(name):
    return {**OFF_POLICY, **CASES[name]}


def case_rollouts(name):
    if CASES[name].get("steps_per_generation") == 4:
        return Rollouts(num_prompts=4)
    return Rollouts(truncate=CASES[name].get("mask_truncated_completions", False))


def fixed_plan(groups):
    """A plan_step that splits the first trajectories as told, whatever they are, and puts all others together."""
    told = {i for group in groups for i in group}

    def plan(tree, max_tokens, **options):
        own = [tuple(i for i in group if i < tree.num_trajectories) for group in groups]
        own.append(tuple(i for i in range(tree.num_trajectories) if i not in told))
        microbatches = [(Microbatch(group, 1),) for group in own if group]
        return StepPlan(tuple(microbatches), tree.num_tokens)

    return plan


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("case", CASES)
def test_equals_stock(case, plan, checkpoint, stock_runs, tmp_path, monkeypatch):
    stock, other = stock_runs(case)
    if PLANS[plan] is not None:
        monkeypatch.setattr(step_planner, "plan_step", fixed_plan(PLANS[plan]))
    options = {"max_tokens_per_microbatch": WINDOW_ROWS} if plan == "windows" else {}
    tree = train(TreeGRPOTrainer, checkpoint, tmp_path, case_rollouts(case), **{**case_options(case), **options})
    noise = gradient_error(other, stock)
    error = gradient_error(tree, stock)
    assert error <= max(2 * noise, 1e-6), f"gradient error {error:.2e}, noise {noise:.2e}"
    assert parameter_error(tree, stock) <= max(2 * parameter_error(other, stock), 1e-4)
    metric_noise = metric_errors(other, stock)
    for name, difference in metric_errors(tree, stock).items():
        assert difference <= max(2 * metric_noise[name], 1e-5), f"{name}: {difference:.2e}"
    if plan == "windows":
        assert (tree.logs[0]["tree/windows"] > 0) == case_options(case).get("sharing_windows", True)
        return
    # With truncated completions masked, two trajectories have nothing to train and are left out.
    expected = 1 if PLANS[plan] is None else 5 if case == "mask truncated" else 7
    assert tree.logs[0]["tree/microbatches"] == expected


def test_second_step_is_off_policy(stock_runs):
    """The cases above tell the losses apart: a third of the tokens are clipped, and their gradients differ."""
    stock, _ = stock_runs("grpo")
    assert stock.logs[1]["clip_ratio/region_mean"] > 0.2
    gradients = {name: stock_runs(name)[0] for name in ("grpo", "cispo", "sapo", "vespo", "dapo", "grpo delta")}
    for name, run in gradients.items():
        for other_name, other in gradients.items():
            if name != other_name:
                assert gradient_error(run, other) > 1e-3, f"{name} and {other_name} have one gradient"


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_lora(beta, checkpoint, tmp_path):
    options = {**OFF_POLICY, "loss_type": "grpo", "beta": beta}

    def randomise(trainer):  # LoRA starts at zero: half of its gradient would be too
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))

    runs = [
        train(
            trainer_class,
            checkpoint,
            tmp_path,
            trainer_options=None,
            prepare=randomise,
            **{**options, **extra},
            lora=LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj", "kv_b_proj"], lora_dropout=0.0),
        )
        for trainer_class, extra in (
            (GRPOTrainer, {}),
            (GRPOTrainer, {"pad_to_multiple_of": 64}),
            (TreeGRPOTrainer, {"max_tokens_per_microbatch": 100}),
        )
    ]
    stock, other, tree = runs
    assert gradient_error(tree, stock) <= max(2 * gradient_error(other, stock), 1e-6)
    assert all("lora" in name for name in tree.gradients[0])


@pytest.mark.parametrize(
    "mode, loss_type, noise, least, most",
    [
        ("token_truncate", "grpo", 0.8, None, 3.0),
        ("sequence_mask", "dapo", 0.02, 0.95, 3.0),
        ("token_mask", "vespo", 0.03, None, 1.05),
    ],
)
def test_vllm_importance_sampling(mode, loss_type, noise, least, most, checkpoint, tmp_path):
    """The correction needs log-probs of a sampler, not its engine. In each case it changes some ratios.

    Ratios much further from 1 amplify rounding until stock runs that differ in padding are further apart than 1e-5.
    """

    def with_sampler(trainer):
        trainer.use_vllm = True
        trainer.vllm_importance_sampling_correction = True
        trainer._last_loaded_step = 0
        trainer.vllm_generation = type("Sampler", (), {"sync_weights": staticmethod(lambda: None)})()

    options = {
        **OFF_POLICY, "learning_rate": 0.1, "loss_type": loss_type, "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_min": least, "vllm_importance_sampling_clip_max": most,
    }  # fmt: skip
    stock, tree, uncorrected = (
        train(c, checkpoint, tmp_path, Rollouts(sampler_noise=noise), prepare=prepare, **options, **extra)
        for c, prepare, extra in (
            (GRPOTrainer, with_sampler, {}),
            (TreeGRPOTrainer, with_sampler, {"max_tokens_per_microbatch": 100}),
            (GRPOTrainer, None, {}),
        )
    )
    ratios = [stock.logs[0][f"sampling/importance_sampling_ratio/{end}"] for end in ("min", "max")]
    assert ratios[1] == most if mode == "token_truncate" else ratios[0] == 0
    assert max(g.abs().max() for g in stock.gradients[0].values()) > 1e-4
    assert gradient_error(tree, stock) <= 1e-5 < 1e-3 < gradient_error(uncorrected, stock)
    assert max(metric_errors(tree, stock).values()) <= 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"sharing_windows": False},
        {"max_window_gib": 0.0, "gradient_checkpointing": True},
        {"window_cost_rows": 10_000},
        {"offload_producers": True},
    ],
)
def test_window_options_move_no_number(options, checkpoint, tmp_path):
    runs = [
        train(TreeGRPOTrainer, checkpoint, tmp_path, max_tokens_per_microbatch=110, **extra) for extra in ({}, options)
    ]
    assert gradient_error(*runs) <= 1e-5
    assert runs[0].logs[0]["tree/windows"] > 0
    assert (runs[1].logs[0]["tree/windows"] > 0) == ("offload_producers" in options)


def test_fused_modules_reach_both_models(checkpoint, tmp_path):
    """On the CPU they run the stock forward."""
    runs = [train(TreeGRPOTrainer, checkpoint, tmp_path, beta=0.1, fused_modules=fused) for fused in (True, False)]
    assert gradient_error(*runs) == 0
    for run, is_fused in zip(runs, (True, False), strict=True):
        for model in (run.trainer.model, run.trainer.ref_model):
            assert ("forward" in model.model.norm.__dict__) == is_fused


def test_several_sgd_steps(checkpoint, tmp_path):
    options = {"max_steps": 5, "learning_rate": 0.05, "loss_type": "dapo"}
    stock = train(GRPOTrainer, checkpoint, tmp_path, **options)
    other = train(GRPOTrainer, checkpoint, tmp_path, **options, pad_to_multiple_of=64)
    tree = train(TreeGRPOTrainer, checkpoint, tmp_path, **options, max_tokens_per_microbatch=120)
    assert gradient_error(tree, stock) <= max(2 * gradient_error(other, stock), 1e-6)
    for name, parameter in stock.parameters.items():
        assert (tree.parameters[name] - parameter).abs().max() <= 1e-5, name


def test_evaluation(checkpoint, tmp_path):
    data = Dataset.from_dict({"prompt": ["x", "y"]})
    runs = []
    for trainer_class in (GRPOTrainer, TreeGRPOTrainer):
        run = train(
            trainer_class,
            checkpoint,
            tmp_path,
            eval_strategy="steps",
            eval_steps=1,
            per_device_eval_batch_size=8,
            eval_dataset=data,
            router_aux_loss_coef=0.1,
        )
        runs.append(run)
    stock, tree = runs
    assert any("eval_loss" in log for log in stock.logs)
    assert max(metric_errors(tree, stock).values()) <= 1e-4


@pytest.mark.parametrize("method", ["compute_loss", "_compute_loss"])
def test_a_subclass_may_override_the_loss(method, checkpoint, tmp_path):
    """Both of TRL's methods; each trajectory's weight is its own."""

    def overridden(trainer_class):
        def loss(self, model, inputs, **kwargs):
            inputs = {**inputs, "advantages": inputs["advantages"] - 0.1 * inputs["completion_mask"].sum(1).sqrt()}
            return getattr(trainer_class, method)(self, model, inputs, **kwargs)

        return type(trainer_class.__name__, (trainer_class,), {method: loss})

    plain, stock, tree = (
        train(c, checkpoint, tmp_path, max_tokens_per_microbatch=WINDOW_ROWS)
        for c in (GRPOTrainer, overridden(GRPOTrainer), overridden(TreeGRPOTrainer))
    )
    assert gradient_error(tree, stock) <= 1e-5 < gradient_error(plain, stock)
    assert max(metric_errors(tree, stock).values()) <= 1e-5


def test_only_reporting_calls_of_the_loss_are_profiled(checkpoint, tmp_path, monkeypatch):
    logged = []

    def end(self):
        if self.is_main_process and self.name.endswith(".compute_loss"):
            logged.append(self.name)

    monkeypatch.setattr(ProfilingContext, "__exit__", lambda self, *error: end(self))
    train(TreeGRPOTrainer, checkpoint, tmp_path, max_tokens_per_microbatch=WINDOW_ROWS)
    assert logged == ["TreeGRPOTrainer.compute_loss"] * 2  # as stock: once per micro-batch


def test_coupled_loss_raises_before_the_update(checkpoint, tmp_path, monkeypatch):
    class Coupled(TreeGRPOTrainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            log_probs = self._get_per_token_logps_and_entropies(model, None, None, None)[0]
            return loss + log_probs.mean() ** 2  # every trajectory's gradient now depends on all others

    kept = {}

    def keep(trainer):
        kept.update(trainer=trainer, parameters={n: p.detach().clone() for n, p in trainer.model.named_parameters()})

    monkeypatch.setattr(step_planner, "plan_step", fixed_plan(UNEVEN))
    with pytest.raises(RuntimeError, match="couples trajectories.*Nothing was updated"):
        train(Coupled, checkpoint, tmp_path, prepare=keep)
    for name, parameter in kept["trainer"].model.named_parameters():
        assert torch.equal(parameter, kept["parameters"][name])
        assert parameter.grad is None or not parameter.grad.any()


@pytest.mark.parametrize("plan", ["seven microbatches", "windows"])
def test_failure_in_a_microbatch_leaves_no_gradient(plan, checkpoint, tmp_path, monkeypatch):
    """The step raises; with windows in their second, after the first has run backward."""
    if PLANS[plan] is not None:
        monkeypatch.setattr(step_planner, "plan_step", fixed_plan(PLANS[plan]))
    calls, kept = [], {}

    def fail_late(trainer):
        calls.append(trainer)
        kept.update({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
        original = trainer._oracle.gradient

        def gradient(*args):
            calls.append(None)
            if len(calls) > 5:
                raise MemoryError("out of memory")
            return original(*args)

        trainer._oracle.gradient = gradient

    with pytest.raises(MemoryError):
        train(TreeGRPOTrainer, checkpoint, tmp_path, prepare=fail_late, max_tokens_per_microbatch=WINDOW_ROWS)
    trainer = calls[0]
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())
    assert all(torch.equal(p, kept[n]) for n, p in trainer.model.named_parameters())
    assert not trainer.optimizer.state_dict()["state"] and trainer.state.global_step == 0


def test_refused_options(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="max_tokens_per_microbatch"):
        TreeGRPOConfig(output_dir=str(tmp_path), max_tokens_per_microbatch=0, use_cpu=True)
    for options in (
        {"max_window_gib": -1.0},
        {"max_window_gib": float("inf")},
        {"max_window_gib": float("nan")},
        {"max_window_gib": 1.0, "gradient_checkpointing": False},
        {"max_window_gib": 1.0, "sharing_windows": False},
        {"offload_producers": True, "sharing_windows": False},
        {"window_cost_rows": 0, "sharing_windows": False},
        {"window_cost_rows": -1},
    ):
        with pytest.raises(ValueError, match="max_window_gib|window_cost_rows"):
            TreeGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)
    for kwargs in ({"use_reentrant": True}, {"preserve_rng_state": False}):  # without the key, torch is reentrant
        with pytest.raises(ValueError, match="use_reentrant=False.*sharing_windows=False"):
            options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}
            train(TreeGRPOTrainer, checkpoint, tmp_path, **options)
    with pytest.raises(ValueError, match="torch_compile"):
        train(TreeGRPOTrainer, checkpoint, tmp_path, torch_compile=True)
    with pytest.raises(ValueError, match="neftune"):
        train(TreeGRPOTrainer, checkpoint, tmp_path, neftune_noise_alpha=5.0)
    with pytest.raises(UnsupportedModelError, match="lora_dropout"):
        train(TreeGRPOTrainer, checkpoint, tmp_path, lora=LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))
    with pytest.raises(NotImplementedError, match="image"):
        data = Dataset.from_dict({"prompt": ["x"] * 8, "image": ["a"] * 8})
        train(TreeGRPOTrainer, checkpoint, tmp_path, trainer_options={"train_dataset": data, "reward_funcs": len})
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=260)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        train(TreeGRPOTrainer, str(tmp_path / "gpt2"), tmp_path)


def test_bf16_model_with_an_fp32_head(checkpoint, tmp_path):
    """TRL's `cast_lm_head_to_fp32` projects in fp32; so does the tree, and resuming keeps the head's precision."""
    options = {"cast_lm_head_to_fp32": True, "dtype": torch.bfloat16, "save_strategy": "steps", "save_steps": 1}
    tree = train(TreeGRPOTrainer, checkpoint, tmp_path / "tree", **options)
    stock = train(GRPOTrainer, checkpoint, tmp_path / "stock", **options)
    other = train(GRPOTrainer, checkpoint, tmp_path / "stock", **options, pad_to_multiple_of=64)
    assert gradient_error(tree, stock) <= 2 * gradient_error(other, stock)
    batch = CompactBatch(PrefixTree.from_sequences([[5, 9, 30, 31], [5, 9, 77]]))
    model = tree.trainer.model
    assert model.lm_head.weight.dtype == torch.float32
    with torch.no_grad():
        exact = model(harts_batch=batch, head_in_fp32=True).log_probs
        rounded = model(harts_batch=batch).log_probs
    assert not torch.equal(exact, rounded)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    tree.trainer._load_from_checkpoint(str(tmp_path / "tree" / "checkpoint-1"))
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_interrupted_step_does_not_join_the_next(checkpoint, tmp_path):
    """A second `train()` after an exception in the middle of an accumulation window starts a window of its own."""
    kept = []

    def interrupt_once(trainer):
        original = trainer._prepare_inputs

        def prepare_inputs(inputs):
            kept.append(trainer)
            if len(kept) == 2:
                raise KeyboardInterrupt
            return original(inputs)

        trainer._prepare_inputs = prepare_inputs

    with pytest.raises(KeyboardInterrupt):
        train(TreeGRPOTrainer, checkpoint, tmp_path, prepare=interrupt_once)
    trainer = kept[0]
    assert len(trainer._micro_batches) == 1
    trainer.train()
    assert trainer.state.global_step == 1 and trainer._micro_batches == []


def test_images_are_refused(checkpoint, tmp_path):
    trainer = train(TreeGRPOTrainer, checkpoint, tmp_path).trainer
    with pytest.raises(NotImplementedError, match="pixel_values"):
        trainer._get_per_token_logps_and_entropies(
            trainer.model, torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4), 2, pixel_values=torch.ones(1)
        )


def test_attention_mask_with_a_hole_is_refused(checkpoint, tmp_path):
    trainer = train(TreeGRPOTrainer, checkpoint, tmp_path).trainer
    with pytest.raises(ValueError, match="row 0.*hole"):
        trainer._get_per_token_logps_and_entropies(
            trainer.model, torch.ones(1, 4, dtype=torch.long), torch.tensor([[1, 0, 1, 1]]), 2
        )
    with pytest.raises(ValueError, match="empty prompt"):
        trainer._get_per_token_logps_and_entropies(
            trainer.model, torch.ones(1, 4, dtype=torch.long), torch.tensor([[0, 0, 1, 1]]), 2
        )


def test_saved_checkpoint_is_stock(checkpoint, tmp_path):
    run = train(TreeGRPOTrainer, checkpoint, tmp_path)
    run.trainer.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, run.parameters[name])
