"""Peers of two trainers of other libraries, in settings that their users take: run as a process each.

`python -m tests.foreign.trainers lora|bf16 [INVITE]` prints JSON lines: the invite, and at the end the epoch, a digest
of the weights, and the warnings. It waits for a line on stdin before it trains.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch

import shoal
from shoal.compression import Uniform8BitQuantization
from shoal.events import Event, Warned
from tests.integration.scripts import digest, say

BATCH, STEPS = 8, 16

warnings: list[str] = []


def joined() -> shoal.DHT:
    """The DHT of this peer; says the invite, and waits until the other one is there."""
    dht = shoal.DHT(initial_peers=sys.argv[2:], start=True)
    dht.events.subscribe(_note)
    say("invite", str(dht.invite("run")))
    sys.stdin.readline()
    return dht


def _note(event: Event) -> None:
    if isinstance(event, Warned):
        warnings.append(event.message)


def lora() -> None:
    """GPT-2 with LoRA under Hugging Face's Trainer: its optimizer has two groups, and one of them is empty."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import peft
    import transformers

    from shoal.integrations.transformers import SwarmCallback

    class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": tokens, "labels": tokens}

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    lora_config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=2, fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora_config)
    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=10_000,
        use_cpu=True,
    )
    dht = joined()
    swarm = SwarmCallback(model, arguments, dht=dht, run_id="run", target_batch_size=4 * BATCH)
    assert swarm.optimizer is not None
    say("groups", [len(group["params"]) for group in swarm.optimizer.param_groups])
    transformers.Trainer(model, arguments, train_dataset=Data(), optimizers=swarm.optimizers, callbacks=[swarm]).train()
    ended(dht, model, swarm.optimizer)


def bf16() -> None:
    """Lightning in `bf16-true`, which sets the default dtype of the process in each step, with 8-bit gradients."""
    import lightning

    from shoal.integrations.lightning import SwarmCallback

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[0].amax(1, keepdim=True))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    samples = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples), batch_size=BATCH)
    dht, module = joined(), Module()
    swarm = SwarmCallback(
        dht=dht, run_id="run", target_batch_size=4 * BATCH, grad_compression=Uniform8BitQuantization()
    )
    lightning.Trainer(
        max_steps=STEPS,
        callbacks=[swarm],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        accelerator="cpu",
        precision="bf16-true",
    ).fit(module, data)
    ended(dht, module, swarm.optimizer)


def ended(dht: shoal.DHT, model: torch.nn.Module, swarm: shoal.Optimizer | None) -> None:
    """Say what is here at the end."""
    assert swarm is not None
    say("ended", [swarm.local_epoch, digest([*model.state_dict().values()]), warnings])
    dht.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"lora": lora, "bf16": bf16}[sys.argv[1]]()
