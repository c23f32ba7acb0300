"""LoRA: everybody who runs this trains the same small adapters of a frozen language model, and only these travel.

`python examples/lora.py` prints an invite; `python examples/lora.py INVITE`, in another terminal, joins. The model is a
tiny GPT-2 with random weights, so that nothing is downloaded (`pip install -e '.[examples]'`): put `from_pretrained`
in its place, the same on all peers.
"""

import os
import sys
import time
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import shoal

EPOCHS, BATCH, LENGTH = int(os.environ.get("EPOCHS", "200")), 8, 64

torch.set_num_threads(1)  # so that several peers fit on one machine
torch.manual_seed(0)  # one base on all peers: another one is refused
base = GPT2LMHeadModel(
    GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None)
)
model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["c_attn"], fan_in_fan_out=True))

text = torch.tensor(list("\n".join(topics.values()).encode()))
pieces = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
data = torch.utils.data.TensorDataset(pieces)  # the same on all peers, in one order


def main():
    """Train to the end, and save the adapters."""
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    dht = shoal.DHT(initial_peers=sys.argv[1:], host_maddrs="/ip4/0.0.0.0/tcp/0", start=True)
    print(dht.invite("lora"), flush=True)
    swarm = shoal.Optimizer(
        dht=dht,
        run_id="lora",
        strategy=shoal.strategies.Synchronous(target_batch_size=64, max_grad_norm=1.0),
        batch_size_per_step=BATCH,
        optimizer=torch.optim.AdamW(adapters, lr=2e-2),
        model=model,  # the frozen weights are compared with those of the other peers
    )
    swarm.announce_end(EPOCHS)
    sampler = shoal.data.PeerSampler(data, swarm, endless=True)
    shown = 0.0
    for (batch,) in torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        swarm.step()
        swarm.zero_grad()
        if time.monotonic() > shown + 2:
            shown = time.monotonic()
            print(f"{swarm.status()}, loss {loss.item():.3f}", flush=True)
        if swarm.finished:
            break
    dht.shutdown()
    model.eval()
    with torch.no_grad():
        loss = model(input_ids=pieces[:100], labels=pieces[:100]).loss.item()
    few, all_of_them = sum(each.numel() for each in adapters), sum(each.numel() for each in model.parameters())
    print(f"loss {loss:.4f} at epoch {swarm.local_epoch}, with {few:,} of {all_of_them:,} parameters trained")
    if folder := os.environ.get("SAVE"):
        model.save_pretrained(folder)  # adapters alone, as peft loads them


if __name__ == "__main__":
    main()
