"""The demo's text, batches, model and training loop."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal import events
from shoal.demo import messages as say
from shoal.demo import training as learn
from shoal.demo.batches import MaskedBatches, held_out_batches
from shoal.demo.lifeline import Lifeline
from shoal.demo.model import ModelConfig, build_model
from shoal.demo.peer import Peer
from shoal.demo.settings import Training, warm_up
from shoal.demo.text import MASK, SPECIALS, UNKNOWN, Corpus, Tokenizer, load_corpus, paragraphs
from tests.unit.demo_kit import id_of, noted

SMALL = Training(vocabulary=2048, sequence=16, embedding=8, hidden=16, heads=2, target_batch=32, micro_batch=8)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """The real text: reading it takes less than a second."""
    return load_corpus()


# --------------------------------------------------------------------------------------------------------------- text


def test_text_is_english_prose_each_paragraph_once() -> None:
    """There is a lot of it, in words, without the markup and code that it comes with."""
    found = paragraphs()
    assert sum(map(len, found)) > 300_000
    assert len(set(found)) == len(found)
    words = most_common_words(found)
    assert [word for word, _ in words[:3]] == ["the", "a", "is"]
    assert not any(sign in paragraph for paragraph in found for sign in ("*", "`", ">>>", "::="))


def most_common_words(texts: Iterable[str]) -> list[tuple[str, int]]:
    """Words by how often they occur."""
    from collections import Counter

    return Counter(word for text in texts for word in text.split()).most_common(5)


def test_same_python_gives_the_same_tokens(corpus: Corpus) -> None:
    """Peers compare the digest: it must not depend on the process."""
    again = load_corpus()
    assert again.digest == corpus.digest
    assert again.tokenizer.vocabulary == corpus.tokenizer.vocabulary
    assert load_corpus(vocabulary_size=1024).digest != corpus.digest


def test_nothing_held_out_is_in_the_training_text(corpus: Corpus) -> None:
    """No 16 tokens in a row of a held-out paragraph were trained on, but for set phrases."""
    width = 16
    train = {bytes(corpus.train[begin : begin + width]) for begin in range(len(corpus.train) - width)}
    held_out = [bytes(corpus.held_out[begin : begin + width]) for begin in range(len(corpus.held_out) - width)]
    assert len(corpus.held_out) > 5_000
    assert sum(run in train for run in held_out) < 0.05 * len(held_out)


def test_vocabulary_covers_its_own_text(corpus: Corpus) -> None:
    """Every character is a token of its own, so nothing in the training text is unknown; most words are whole."""
    assert len(corpus.tokenizer) == 2048
    assert UNKNOWN not in corpus.train
    pieces = sum(corpus.tokenizer.vocabulary[index].startswith("#") for index in corpus.train)
    assert pieces < 0.2 * len(corpus.train)


def test_tokenizer_cuts_rare_words_into_known_pieces() -> None:
    """Frequent words are whole; others are the longest known beginning and the longest known pieces."""
    tokenizer = Tokenizer(["[unk]", "[mask]", "[sep]", "the", "un", "#know", "#n", "#k", "."])
    indices = tokenizer.encode("The unknown. €")
    assert [tokenizer.vocabulary[index] for index in indices] == ["the", "un", "#know", "#n", ".", "[unk]"]
    assert tokenizer.decode(indices) == "the unknown . [unk]"


@given(st.lists(st.text("abcde .,1é€", min_size=1), min_size=1, max_size=5), st.integers(25, 60))
def test_what_was_counted_can_be_read_back(texts: list[str], size: int) -> None:
    """A vocabulary with room for all characters loses nothing of its own text but the spaces."""
    tokenizer = Tokenizer.build(texts, size=size, pieces=5)
    assert len(tokenizer) <= size
    for text in texts:
        decoded = tokenizer.decode(tokenizer.encode(text))
        assert "".join(decoded.split()) == "".join(text.lower().split())


# ------------------------------------------------------------------------------------------------------------ batches


def test_masking_is_berts(corpus: Corpus) -> None:
    """15% are chosen; of those 80% show the mask, 10% another token, 10% themselves; the rest is untouched."""
    batch = MaskedBatches(corpus, batch_size=512, sequence=64, seed=3).draw(512)
    shown, truth = batch.inputs.flatten()[batch.chosen], batch.targets
    assert len(truth) / batch.inputs.numel() == pytest.approx(0.15, abs=0.01)
    assert (shown == MASK).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (shown == truth).float().mean().item() == pytest.approx(0.1, abs=0.02)
    assert int(truth.min()) >= UNKNOWN
    rest = torch.ones(batch.inputs.numel(), dtype=torch.bool)
    rest[batch.chosen] = False
    assert MASK not in batch.inputs.flatten()[rest]
    assert batch.inputs.max() < 2048
    assert ((shown == MASK) | (shown >= len(SPECIALS)) | (shown == truth)).all()


def test_streams_are_repeatable_and_differ_between_peers(corpus: Corpus) -> None:
    """The seed alone decides."""

    def first(seed: int) -> torch.Tensor:
        return next(MaskedBatches(corpus, batch_size=4, sequence=16, seed=seed)).inputs

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


def test_held_out_batches_are_the_same_for_all_and_do_not_overlap(corpus: Corpus) -> None:
    """Losses of different peers can be compared."""
    one, other = (held_out_batches(corpus, batch_size=32, sequence=64, at_most=100) for _ in range(2))
    assert [len(batch.inputs) for batch in one] == [32, 32, 32, 4]
    assert all(
        torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) for a, b in zip(one, other, strict=True)
    )


# -------------------------------------------------------------------------------------------------------------- model


def test_same_seed_same_weights_and_global_chance_untouched() -> None:
    """Peers start equal without sending anything, and the user's random state is as before."""
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, other = learn.make_model(SMALL), learn.make_model(SMALL)
    assert torch.equal(torch.rand(1), expected)
    assert learn.weights_sha256(one.parameters()) == learn.weights_sha256(other.parameters())
    different = learn.make_model(msgspec.structs.replace(SMALL, seed=2))
    assert learn.weights_sha256(different.parameters()) != learn.weights_sha256(one.parameters())


def test_layer_is_shared_head_is_tied() -> None:
    """Depth costs no parameters, and the token table is also the output."""
    config = ModelConfig(vocabulary=50, sequence=8, embedding=4, hidden=8, heads=2, depth=1)
    deep = ModelConfig(vocabulary=50, sequence=8, embedding=4, hidden=8, heads=2, depth=6)
    count = [sum(parameter.numel() for parameter in build_model(c, seed=1).parameters()) for c in (config, deep)]
    assert count[0] == count[1]
    model = build_model(config, seed=1)
    assert sum(parameter.shape == (50, 4) for parameter in model.parameters()) == 1
    assert not any(parameter.shape == (4, 50) for parameter in model.parameters())


def test_guesses_use_both_sides_and_only_the_chosen_places() -> None:
    """Changing the last token changes the guess at the first; the number of guesses is the number of places."""
    model = build_model(ModelConfig(vocabulary=50, sequence=8, embedding=8, hidden=16, heads=4, depth=2), seed=1)
    inputs = torch.arange(3, 11).repeat(2, 1)
    inputs[1, 7] = 40
    guesses = model(inputs, torch.tensor([0, 8]))
    assert guesses.shape == (2, 50)
    assert not torch.allclose(guesses[0], guesses[1])


def test_first_loss_is_that_of_guessing_blindly(corpus: Corpus) -> None:
    """About the logarithm of the vocabulary: the first weights know nothing and shout nothing."""
    model = learn.make_model(Training())
    loss = learn.held_out_loss(model, held_out_batches(corpus, batch_size=32, sequence=64, at_most=32))
    assert loss == pytest.approx(7.62, abs=0.35)


def test_model_learns_from_text_in_few_steps(corpus: Corpus) -> None:
    """The loss falls well below blind guessing within twenty steps; NaN would not."""
    training = msgspec.structs.replace(SMALL, hidden=32, embedding=16, heads=4, warm_up_epochs=5)
    model = learn.make_model(training)
    optimizer = learn.make_optimizer(training, model.parameters())
    schedule = learn.make_schedule(training, optimizer)
    held_out = held_out_batches(corpus, batch_size=32, sequence=16, at_most=64)
    before = learn.held_out_loss(model, held_out)
    for batch in itertools.islice(learn.draw_batches(training, corpus, 1), 20):
        model.loss(batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert learn.held_out_loss(model, held_out) < before - 0.7


def test_schedule_follows_the_warm_up() -> None:
    """Epoch by epoch the optimizer's rate is what `warm_up` says."""
    model = learn.make_model(SMALL)
    optimizer = learn.make_optimizer(SMALL, model.parameters())
    schedule = learn.make_schedule(SMALL, optimizer)
    for epoch in range(12):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(SMALL.learning_rate * warm_up(SMALL, epoch))
        optimizer.step()
        schedule.step()


def test_hash_of_weights_is_of_their_bytes_in_order() -> None:
    """One bit, or the order, makes another hash; the layout in memory does not."""
    import hashlib

    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    other = torch.ones(2)
    expected = hashlib.sha256(bytes(tensor.numpy().tobytes() + other.numpy().tobytes())).hexdigest()
    assert learn.weights_sha256([tensor, other]) == expected
    assert learn.weights_sha256([tensor.t().contiguous().t(), other]) == expected
    assert learn.weights_sha256([other, tensor]) != expected


# ----------------------------------------------------------------------------------------------------------- lifeline


def test_lifeline_hands_over_commands_and_reports() -> None:
    """The newest stop counts; what is no command is passed over; leave is remembered."""
    heard = [say.encode(say.Stop(epoch=4)), b"nonsense", say.encode(say.Stop(epoch=6)), say.encode(say.Leave())]
    out = io.BytesIO()
    ended = threading.Event()

    def lines() -> Iterator[bytes]:
        yield from heard
        ended.set()
        threading.Event().wait()  # the pipe stays open: its end would end this process

    line = Lifeline(lines(), out)
    threading.Thread(target=line.listen, daemon=True).start()
    assert ended.wait(60)
    assert line.wait_for_leave(0)
    assert line.told_to_leave
    assert line.stop_epoch() == 6
    assert line.stop_epoch() is None
    line.say(noted("x"))
    assert say.decode_report(out.getvalue().rstrip(b"\n")) == noted("x")


# --------------------------------------------------------------------------------------------------------- peer's loop


class Alone:
    """A swarm of one: steps by itself after enough samples, and knows the end it was told."""

    peer_id, run_id, addresses = "me", "run", ("here",)

    def __init__(
        self, config: say.PeerConfig, parameters: Iterable[torch.Tensor], tell: Callable[[events.Event], None]
    ) -> None:
        self._training, self._tell = config.training, tell
        self._optimizer = learn.make_optimizer(config.training, parameters)
        self._samples = self.epoch = 0
        self.last: int | None = None
        self.left = False

    @property
    def finished(self) -> bool:
        return self.last is not None and self.epoch >= self.last

    def catch_up(self) -> None:
        pass

    def step(self) -> None:
        self._samples += self._training.micro_batch
        if self._samples >= self._training.target_batch:
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.epoch += 1
            self._samples = 0
            digest = bytes(32)
            self._tell(events.PeerConnected(peer=id_of("elm")))  # of which the supervisor is not told
            self._tell(events.EpochAdvanced(run_id="run", epoch=self.epoch, samples=32, peers=1, digest=digest))

    def announce_end(self, epoch: int) -> None:
        self.last = epoch

    def leave(self) -> None:
        self.left = True


def test_peer_trains_to_the_announced_epoch_and_reports_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """From ready through training and the held-out loss to the hash; then it waits to be sent home, and leaves."""
    member: list[Alone] = []

    def join(config: say.PeerConfig, run_id: str, parameters: Iterable[torch.Tensor], tell: Any) -> Alone:
        assert run_id.startswith("demo-x-")
        member.append(Alone(config, parameters, tell))
        return member[0]

    monkeypatch.setattr("shoal.demo.swarm.join", join)
    out = io.BytesIO()
    commands = [say.encode(say.Stop(epoch=3)), say.encode(say.Leave())]
    line = Lifeline([], out)
    config = say.PeerConfig(
        name="oak",
        run_id="demo-x",
        initial_peers=(),
        speed=1.0,
        stream_seed=1,
        judge_turn=2,
        judge_every=8,
        training=SMALL,
    )
    line._commands.append(say.decode_command(commands[0]))
    monkeypatch.setattr(line, "wait_for_leave", lambda within_s: within_s > 0)
    threads = torch.get_num_threads()
    try:
        Peer(config, line).run()
    finally:
        torch.set_num_threads(threads)
    reports = [say.decode_report(text) for text in out.getvalue().splitlines()]
    kinds = [type(report) for report in reports]
    assert kinds.index(say.Ready) < kinds.index(say.HeldOutLoss) < kinds.index(say.Finished)
    assert [report.epoch for report in reports if isinstance(report, events.EpochAdvanced)] == [1, 2, 3]
    assert [report.epoch for report in reports if isinstance(report, say.HeldOutLoss)] == [0, 2]
    final = reports[-1]
    assert isinstance(final, say.Finished)
    assert final.epoch == 3
    assert final.weights_sha256 == learn.weights_sha256(member[0]._optimizer.param_groups[0]["params"])
    assert member[0].left
    assert "PeerConnected" not in {kind.__name__ for kind in kinds}
    working = [report for report in reports if isinstance(report, say.Working)]
    assert [report.state for report in working][:2] == ["loading torch", "joining"]
    assert working[-1].state == "training"
