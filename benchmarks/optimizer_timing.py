"""The time of an optimizer's update, which no step of `end_to_end.py` includes."""

import statistics
import time

import torch


def time_optimizer(model) -> dict:
    """Seconds of one update by fused AdamW with moments in the parameters' dtype, at a learning rate of 0.

    The gradients of the pass before are there; a clipping of their norm is part of it, as in training.
    """
    kind = "fused AdamW without a master copy in fp32, clipping included"
    parameters = [p for p in model.parameters() if p.grad is not None]
    try:
        optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=True)
        times = []
        for _ in range(3):  # the first makes the moments
            torch.cuda.synchronize()
            begin = time.perf_counter()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        result = {"kind": kind, "seconds": round(statistics.median(times[1:]), 4)}
    except torch.OutOfMemoryError:
        return {"kind": kind, "seconds": "out of memory"}
    del optimizer
    torch.cuda.empty_cache()
    return result
