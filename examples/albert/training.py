"""What the trainers, the monitor and the process that trains alone have in common: settings, data, model, optimizer.

The peers of a run compare what follows from these settings: a peer with another model, learning rate or tokenizer is
refused, with the setting's name.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from pytorch_optimizer import Lamb
from safetensors.torch import load_file
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from shoal.compression import Float16Compression
from shoal.integrations.transformers import SwarmCallback
from shoal.strategies import Synchronous


def parser(description):
    """The arguments that must be equal on all peers, but for `--peers` and `--host`."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = found.add_argument
    add("--peers", nargs="*", default=[], help="invites or addresses of peers; without any, a new swarm begins")
    add("--host", default="0.0.0.0", help="address to listen at; 127.0.0.1 keeps other machines out")
    add("--port", type=int, default=0, help="0 takes a free one")
    add("--run", default="albert", help="name of the run")
    add("--data", type=Path, default=Path("albert-data"), help="folder that tokenize_text.py has written")
    add("--epochs", type=int, default=200, help="steps of the swarm, after which the run ends")
    add("--target-batch-size", type=int, default=256, help="samples of all peers together in one step")
    add("--learning-rate", type=float, default=0.02, help="after the warm-up; then it falls linearly to 0")
    add("--warmup", type=int, default=20, help="steps of the swarm in which the learning rate rises")
    add("--hidden", type=int, default=128, help="width of the model; it has 4 times as many intermediate units")
    add("--layers", type=int, default=4, help="which share their weights, as ALBERT's do")
    add("--heads", type=int, default=2, help="of attention")
    add("--embedding", type=int, default=64, help="width of the embeddings")
    add("--delayed", action=argparse.BooleanOptionalAction, default=True, help="train on while gradients are averaged")
    add("--beta1", type=float, default=0.5, help="momentum of LAMB: 0.9 bears no late gradients (--delayed)")
    return found


class Pairs(torch.utils.data.Dataset):
    """Each pair of segments twice: in its order, and the other way round. The model is to tell which it is.

    Args:
        pairs: tokens, [pairs, 2, length].
        tokenizer: for the tokens around them.
    """

    def __init__(self, pairs, tokenizer):
        self.pairs, self.cls, self.sep = pairs, tokenizer.cls_token_id, tokenizer.sep_token_id

    def __len__(self):
        return 2 * len(self.pairs)

    def __getitem__(self, index):
        swapped = index % 2
        first, second = self.pairs[index // 2].flip(0) if swapped else self.pairs[index // 2]
        return {
            "input_ids": [self.cls, *first.tolist(), self.sep, *second.tolist(), self.sep],
            "token_type_ids": [0] * (len(first) + 2) + [1] * (len(second) + 1),
            "sentence_order_label": swapped,
        }


class Data:
    """What `tokenize_text.py` has written.

    Args:
        folder: that it has written to.

    Attributes:
        train, held_out: data sets.
        collate: makes a batch, in which it masks 15% of the tokens anew each time.
        digest: of the tokenizer.
    """

    def __init__(self, folder):
        file = folder / "tokenizer.json"
        self.digest = hashlib.sha256(file.read_bytes()).hexdigest()
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(file),
            pad_token="[PAD]",
            unk_token="[UNK]",
            cls_token="[CLS]",
            sep_token="[SEP]",
            mask_token="[MASK]",
        )
        tokens = load_file(folder / "tokens.safetensors")
        self.train, self.held_out = (Pairs(tokens[part], self.tokenizer) for part in ("train", "held_out"))
        self.collate = DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=0.15)


def make_model(args, data):
    """ALBERT for masked words and sentence order, with the same first weights on all peers."""
    torch.manual_seed(0)
    example = data.train[0]["input_ids"]
    return AlbertForPreTraining(
        AlbertConfig(
            vocab_size=len(data.tokenizer),
            embedding_size=args.embedding,
            hidden_size=args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            intermediate_size=4 * args.hidden,
            max_position_embeddings=len(example),
            pad_token_id=data.tokenizer.pad_token_id,
        )
    )


def make_lamb(model, args):
    """LAMB, with weight decay for matrices and without for biases and norms."""
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return Lamb(groups, lr=args.learning_rate, betas=(args.beta1, 0.999), eps=1e-6)


def trainer_arguments(args, output, **options):
    """The arguments of a Trainer: `max_steps` and `warmup_steps` are steps of the swarm."""
    return TrainingArguments(
        output_dir=str(output),
        max_steps=args.epochs,
        warmup_steps=args.warmup,
        lr_scheduler_type="linear",
        learning_rate=args.learning_rate,
        max_grad_norm=1.0,
        report_to=[],
        **options,
    )


def join(model, arguments, args, data, dht, **options):
    """Make this process a peer of the run."""
    return SwarmCallback(
        model,
        arguments,
        dht=dht,
        run_id=args.run,
        strategy=Synchronous(
            args.target_batch_size,
            late="overlap" if args.delayed else "drop",
            compression=Float16Compression(),
        ),
        optimizer=make_lamb(model, args),
        settings={"tokenizer": data.digest},  # peers with other tokens are refused
        state_averaging_compression=Float16Compression(),
        **options,
    )


@torch.no_grad()
def held_out_loss(model, data, samples=None, batch=32):
    """Mean loss of the documents that nobody trains on, with the same masks each time.

    Args:
        model: its mode stays as it is.
        data: of the run.
        samples: evenly from all of them; None for all.
        batch: samples at a time.
    """
    step = max(1, len(data.held_out) // samples) if samples else 1
    numbers = range(0, len(data.held_out), step | 1)  # an odd step: pairs in both orders
    total, trains = 0.0, model.training
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for start in range(0, len(numbers), batch):
            examples = [data.held_out[number] for number in numbers[start : start + batch]]
            inputs = {name: value.to(model.device) for name, value in data.collate(examples).items()}
            total += model(**inputs).loss.item() * len(examples)
    model.train(trains)
    return total / len(numbers)


def digest(model):
    """SHA-256 of all parameters, to see that peers hold the same bits."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()
