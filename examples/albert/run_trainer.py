"""A peer that trains: an ordinary Trainer with a `SwarmCallback`.

`python -m examples.albert.run_trainer` prints an invite; with `--peers INVITE`, in another terminal, another one joins.
It goes on from its latest checkpoint in `--output`, and then from the state of the others.
"""

import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

import shoal
from shoal.integrations.metrics import JsonLines, Metrics
from shoal.integrations.transformers import latest_checkpoint

if not __package__:  # run by its path, and not as a module
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.albert.training import Data, digest, join, make_lamb, make_model, parser, trainer_arguments


def main():
    """Train to the end of the run."""
    found = parser(__doc__.split("\n", 1)[0])
    found.add_argument("--output", type=Path, default=Path("albert-trainer"), help="folder, of this peer alone")
    found.add_argument("--batch-size", type=int, default=16, help="samples of this peer at a time")
    found.add_argument("--save-steps", type=int, default=200, help="batches of this peer between two checkpoints")
    found.add_argument("--keep", type=int, default=2, help="so many checkpoints stay")
    found.add_argument("--threads", type=int, default=1, help="of torch")
    found.add_argument("--alone", action="store_true", help="train without shoal, on as many samples")
    args = found.parse_args()
    torch.set_num_threads(args.threads)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("shoal").setLevel("INFO")

    args.output.mkdir(parents=True, exist_ok=True)
    data = Data(args.data)
    model = make_model(args, data)
    arguments = trainer_arguments(
        args,
        args.output,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.target_batch_size // args.batch_size if args.alone else 1,
        logging_steps=20,
        save_steps=args.save_steps,
        save_total_limit=args.keep,
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=True,
    )
    with contextlib.ExitStack() as stack:
        if args.alone:
            trains: dict[str, Any] = {"optimizers": (make_lamb(model, args), None)}
        else:
            place = f"/ip4/{args.host}/tcp/{args.port}"
            dht = stack.enter_context(shoal.DHT(initial_peers=args.peers, host_maddrs=place, start=True))
            print(dht.invite(args.run), flush=True)
            swarm = join(model, arguments, args, data, dht)
            stack.enter_context(Metrics(swarm.optimizer, JsonLines(args.output / "metrics.jsonl")))
            trains = {"optimizers": swarm.optimizers, "callbacks": [swarm]}
        trainer = Trainer(model, arguments, train_dataset=data.train, data_collator=data.collate, **trains)
        trainer.model_accepts_loss_kwargs = False  # ALBERT takes `num_items_in_batch`, and does not use it
        trainer.train(resume_from_checkpoint=latest_checkpoint(args.output))
        epoch = args.epochs if args.alone else swarm.optimizer.local_epoch
        trainer.save_model(args.output / "final")
        print(f"epoch {epoch}, parameters {digest(model)}", flush=True)


if __name__ == "__main__":
    main()
