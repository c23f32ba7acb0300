"""One rank of a model that `shoal.zero` shards: a child of `benchmarks.turns`. The model is that of `benchmarks.zero`.

=========  ==========================================  =============================================================
request    meaning                                     answer
=========  ==========================================  =============================================================
start      meet the other ranks, shard the model       nothing
work       train `steps` steps                         `seconds`
stop       leave                                       nothing
=========  ==========================================  =============================================================
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.contenders.orders import obey
from benchmarks.contenders.zero_ranks import BATCH, ENGINES, TOKENS, Gpt, Shape


class Rank:
    """Joins the others when it is started."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "start":
                self.start()
                return {}
            case "work":
                dist.barrier()
                began = time.perf_counter()
                for _ in range(request["steps"]):
                    self.step()
                return {"seconds": time.perf_counter() - began}
            case _:
                dist.destroy_process_group()
                return {}

    def start(self) -> None:
        """The ranks meet by a file, so that no port can be taken."""
        args = self.args
        dist.init_process_group("gloo", init_method=f"file://{args.file}", rank=args.rank, world_size=args.ranks)
        torch.manual_seed(1)
        self.shape = Shape.of(args.params)
        self.model, self.optimizer, _ = ENGINES[args.engine](Gpt(self.shape))
        self.tokens = torch.Generator().manual_seed(args.rank)

    def step(self) -> None:
        """One batch, forward and back, and the optimizer's step."""
        tokens = torch.randint(0, self.shape.vocabulary, (BATCH, TOKENS + 1), generator=self.tokens)
        logits = self.model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--params", type=float, required=True)
    parser.add_argument("--file", required=True)
    torch.set_num_threads(1)
    obey(Rank(parser.parse_args()).answer)
