"""The samples of models in the manner of users: counted right, or asked for; and wrong sizes are told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from shoal.errors import ConfigError
from shoal.train.batch_rows import BatchRows, rows_of, samples_of

STEPS, BATCH, WIDTH = 7, 3, 4


class Model(nn.Module):
    """Layers, and what forward does with them."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function does."""
        return self.run(self, *args, **kwargs)


def losses(output: Any) -> torch.Tensor:
    """A number of all that is returned."""
    if isinstance(output, torch.Tensor):
        return output.square().mean()
    values = output.values() if isinstance(output, dict) else output
    return torch.stack([losses(each) for each in values if each is not None]).sum()


def counted(model: nn.Module, *batches: Any, by: nn.Module | None = None) -> int | str:
    """The samples of these calls, each with a backward pass; or why they are not known."""
    rows = BatchRows(model, [each for each in model.parameters() if each.requires_grad])
    try:
        for batch in batches:
            args, kwargs = (batch, {}) if isinstance(batch, tuple) else ((), batch)
            torch.autograd.backward([losses((by or model)(*args, **kwargs))])
        return rows.take()
    except ConfigError as error:
        return f"{error}"
    finally:
        rows.close()


def time_first(batch: int = BATCH) -> torch.Tensor:
    """Sequences side by side, as torch's recurrent layers take them by default."""
    return torch.randn(STEPS, batch, WIDTH)


def encoder(**options: Any) -> nn.TransformerEncoderLayer:
    """A small layer of a transformer."""
    return nn.TransformerEncoderLayer(WIDTH, 1, 8, dropout=0.0, **options)


def last(self: Any, x: torch.Tensor) -> Any:
    """A result for each sequence, from the last of its steps."""
    return self.head(self.net(x)[0][-1])


def mixed(self: Any, x: torch.Tensor) -> Any:
    """A result for each row, though the layers have the batch in the second dimension."""
    return self.head(self.net(x).mean(1))


def turned(self: Any, x: torch.Tensor) -> Any:
    """The batch first outside, second inside."""
    return self.net(x.transpose(0, 1))[0].transpose(0, 1)


def embedded(self: Any, x: torch.Tensor) -> Any:
    """Tokens, time first."""
    return self.head(self.net(self.words(x))[0])


def one_by_one(self: Any, x: torch.Tensor) -> Any:
    """A loop over the samples of a batch."""
    return torch.stack([self.net(each) for each in x])


def head() -> nn.Linear:
    """The last layer."""
    return nn.Linear(WIDTH, 2)


TOKENS = torch.randint(0, 9, (STEPS, BATCH))


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_time_first_layers_were_counted_by_their_steps(kind: Any) -> None:
    """Without batch_first the batch is in the second dimension: the layer alone, within a model, after an embedding."""
    layer = kind(WIDTH, WIDTH)
    assert counted(layer, (time_first(),), (time_first(5),)) == BATCH + 5
    assert counted(Model(last, net=layer, head=head()), (time_first(),), (time_first(5),)) == BATCH + 5
    assert counted(Model(embedded, net=layer, head=head(), words=nn.Embedding(9, WIDTH)), (TOKENS,)) == BATCH
    assert counted(Model(turned, net=layer), (torch.randn(BATCH, STEPS, WIDTH),)) == BATCH
    assert counted(kind(WIDTH, WIDTH, batch_first=True), (torch.randn(BATCH, STEPS, WIDTH),)) == BATCH


def test_as_many_steps_as_samples_decide_nothing_for_later_batches() -> None:
    """A batch of equal sizes is the same either way; the next one tells."""
    model = Model(last, net=nn.LSTM(WIDTH, WIDTH), head=head())
    assert counted(model, (time_first(STEPS),), (time_first(),)) == STEPS + BATCH


def test_time_first_transformers_were_counted_by_their_steps() -> None:
    """Sources and targets have other lengths, and a mask has no samples."""
    with pytest.warns(UserWarning, match="enable_nested_tensor"):
        both = nn.Transformer(WIDTH, 1, 1, 1, 8, dropout=0.0)
    mask = both.generate_square_subsequent_mask(5)
    batch = {"src": time_first(), "tgt": torch.randn(5, BATCH, WIDTH), "tgt_mask": mask}
    assert counted(both, batch) == BATCH
    assert counted(nn.TransformerEncoder(encoder(), 1, enable_nested_tensor=False), {"src": time_first()}) == BATCH
    attention = nn.MultiheadAttention(WIDTH, 1)
    x = time_first()
    assert counted(attention, {"query": x, "key": x, "value": x, "need_weights": False}) == BATCH
    assert (
        counted(
            nn.TransformerEncoder(encoder(batch_first=True), 1, enable_nested_tensor=False),
            (torch.randn(BATCH, STEPS, WIDTH),),
        )
        == BATCH
    )


def test_layers_that_get_a_batch_in_the_wrong_dimension() -> None:
    """A result for each row says that rows are samples; a number alone says nothing."""
    rows = torch.randn(STEPS, 5, WIDTH)
    assert counted(Model(mixed, net=encoder(), head=head()), (rows,)) == STEPS

    def inside(self: Any, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return (self.head(self.net(x).mean(1)).sum(1) - labels).square().mean()

    found = counted(Model(inside, net=encoder(), head=head()), {"x": rows, "labels": torch.ones(STEPS)})
    assert isinstance(found, str)
    assert "has the batch second" in found
    assert "batch_size_per_step" in found


def test_one_sample_without_a_batch_was_counted_by_its_first_dimension() -> None:
    """A picture counted 3, for its colours; a row of features counted each of them."""
    picture = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(0), nn.Linear(2 * 6 * 6, 5))
    assert counted(picture, (torch.randn(3, 8, 8),), (torch.randn(3, 8, 8),)) == 2
    assert counted(nn.Conv1d(4, 4, 3, padding=1), (torch.randn(4, 9),)) == 1
    assert counted(nn.ConvTranspose2d(3, 3, 3), (torch.randn(3, 9, 9),)) == 1
    assert counted(nn.Sequential(head(), nn.Tanh()), (torch.randn(WIDTH),), (torch.randn(6, WIDTH),)) == 1 + 6
    assert counted(Model(one_by_one, net=nn.Linear(WIDTH, 2)), (torch.randn(6, WIDTH),)) == 6
    assert counted(Model(lambda self, x: self.net(x[:, None]), net=nn.Linear(1, 2)), (torch.randn(6),)) == 6


def test_one_sequence_is_one_sample_or_is_asked_for() -> None:
    """Rows of features that go through a recurrent layer may be one sequence, or samples in the wrong place."""
    model = Model(last, net=nn.GRU(WIDTH, WIDTH), head=head())
    assert counted(model, (torch.randn(STEPS, WIDTH),)) == 1
    found = counted(nn.LSTM(WIDTH, WIDTH), (torch.randn(STEPS, WIDTH),))
    assert isinstance(found, str)
    assert f"one sequence or {STEPS} samples" in found


@pytest.mark.parametrize("index", [..., None])
def test_a_list_of_samples_that_layers_take_one_by_one_is_no_single_sample(index: Any) -> None:
    """A detector's pictures have other sizes: the list of targets is counted, or the number is asked for."""
    pictures = [torch.randn(3, 8 + each, 9) for each in range(4)]
    model: Any = Model(lambda self, x, targets=None: [self.net(each[index]) for each in x], net=nn.Conv2d(3, 2, 3))
    assert counted(model, (pictures, [{"labels": torch.ones(2)} for _ in pictures])) == 4
    found = counted(model, (pictures,))
    assert isinstance(found, str)
    assert "list of tensors" in found
    assert counted(model, (pictures[:1],)) == 1


WORDS, IDS = nn.Embedding(9, WIDTH), torch.randint(0, 9, (STEPS,))


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (Model(lambda self, x: self.net(x.unsqueeze(0)), net=head()), torch.randn(WIDTH)),
        (Model(lambda self, x: self.net(x[None]), net=nn.Conv2d(3, 2, 3)), torch.randn(3, 8, 8)),
        (Model(lambda self, x: self.net(x[None]).squeeze(0), net=nn.Conv2d(3, 3, 3)), torch.randn(3, 8, 8)),
        (Model(lambda self, x: self.net(x.permute(2, 0, 1)[None]), net=nn.Conv2d(3, 2, 3)), torch.randn(8, 8, 3)),
        (Model(lambda self, x: self.net(x.permute(2, 0, 1)), net=nn.Conv2d(3, 2, 3)), torch.randn(8, 8, 3)),
        (Model(lambda self, x: self.net(x[None, None]), net=nn.Conv2d(1, 2, 3)), torch.randn(8, 8)),
        (Model(lambda self, x: self.net(x.view(1, 1, -1)), net=nn.Conv1d(1, 2, 3)), torch.randn(9)),
        (Model(lambda self, x: self.net(x.t()[None]), net=nn.Conv1d(WIDTH, 2, 3)), torch.randn(9, WIDTH)),
        (Model(lambda self, x: self.net(self.words(x)[None]), net=encoder(batch_first=True), words=WORDS), IDS),
        (Model(lambda self, x: self.net(self.words(x[None])), net=encoder(batch_first=True), words=WORDS), IDS),
        (Model(lambda self, x: self.net(self.words(x)[None]), net=nn.Linear(WIDTH, 9), words=WORDS), IDS),
        (
            Model(lambda self, x: self.net(x[None])[0][:, -1], net=nn.GRU(WIDTH, 2, batch_first=True)),
            time_first()[:, 0],
        ),
        (Model(lambda self, x: self.net(x.unsqueeze(1))[0][-1], net=nn.GRU(WIDTH, 2)), time_first()[:, 0]),
        (Model(lambda self, x: self.net(x.view(1, -1, 1))[1], net=nn.GRU(1, 2, batch_first=True)), torch.randn(9)),
    ],
)
def test_a_model_that_makes_a_batch_of_one_was_counted_by_the_rows_of_its_sample(model: nn.Module, given: Any) -> None:
    """An observation, a picture, tokens, a sound, a series of numbers: forward itself adds the batch dimension."""
    assert counted(model, (given,), (given.clone(),)) == 2


def test_a_batch_of_one_whose_rows_may_be_samples_is_asked_for() -> None:
    """Results for each row, or none but the loss; and what no layer says, where all results are of one row."""
    net, rows = encoder(batch_first=True), torch.randn(STEPS, WIDTH)
    for model in (
        Model(lambda self, x: self.net(x[None])[0], net=net),
        Model(lambda self, x: self.net(x[None]).square().mean(), net=net),
        Model(lambda self, x: self.net(x.unsqueeze(1))[0], net=nn.LSTM(WIDTH, WIDTH)),
    ):
        found = counted(model, (rows,))
        assert isinstance(found, str)
        assert f"one sequence or {STEPS} samples" in found
    pooled: Any = Model(lambda self, x: self.net(x).mean(0, keepdim=True), net=head())
    found = counted(pooled, (rows,))
    assert isinstance(found, str)
    assert f"given {STEPS} rows, and returned one" in found
    compiled: Any = torch.compile(Model(lambda self, x: self.net(x[None]), net=nn.Conv2d(3, 2, 3)), backend="eager")
    found = counted(compiled, (torch.randn(3, 8, 8),))
    torch._dynamo.reset()
    assert isinstance(found, str)
    assert "given 3 rows, and returned one" in found


def test_batches_beside_a_dimension_of_one_are_counted_by_their_rows() -> None:
    """Channels, steps or a mean that are one; loops over samples; a batch of one that comes before larger ones."""
    wave: Any = Model(lambda self, x: self.net(x.unsqueeze(1)), net=nn.Conv1d(1, 2, 3))
    assert counted(wave, (torch.randn(1, 9),), (torch.randn(4, 9),)) == 1 + 4
    assert counted(Model(one_by_one, net=nn.Conv1d(3, 2, 3)), (torch.randn(5, 3, 9),)) == 5
    loop: Any = Model(lambda self, x: torch.cat([self.net(each[None]) for each in x]), net=head())
    assert counted(loop, (torch.randn(1, WIDTH),), (torch.randn(6, WIDTH),)) == 1 + 6
    step: Any = Model(lambda self, x: self.net(x[:, None])[0][:, 0], net=nn.GRU(WIDTH, 2, batch_first=True))
    assert counted(step, (torch.randn(1, WIDTH),), (torch.randn(6, WIDTH),)) == 1 + 6
    ends: Any = Model(lambda self, x: self.net(x)[1], net=nn.GRU(WIDTH, 2, batch_first=True))
    assert counted(ends, (torch.randn(BATCH, STEPS, WIDTH),)) == BATCH
    assert counted(Model(lambda self, x: self.net(x).mean().view(1), net=head()), (torch.randn(6, WIDTH),)) == 6
    token: Any = Model(lambda self, x: self.net(self.words(x)[None]), net=encoder(batch_first=True), words=WORDS)
    assert counted(token, (IDS[:1],), (IDS,)) == 2


def test_a_compiled_model_is_asked_by_its_results() -> None:
    """Hooks in it would become part of what was compiled."""
    model = Model(last, net=nn.GRU(WIDTH, WIDTH), head=head())
    compiled: Any = torch.compile(model, backend="eager")
    assert counted(compiled, (time_first(),), (time_first(5),)) == BATCH + 5
    assert not any(each._forward_pre_hooks for each in model.modules())
    torch._dynamo.reset()
    unclear: Any = torch.compile(nn.Sequential(encoder()), backend="eager")
    found = counted(unclear, (time_first(),))
    torch._dynamo.reset()
    assert isinstance(found, str)
    assert f"{STEPS} samples or {BATCH}" in found


def test_no_hook_stays_in_the_layers() -> None:
    """The first call of a kind is looked at, also if it raises."""
    model = Model(last, net=nn.GRU(WIDTH, WIDTH), head=head())
    rows = BatchRows(model, list(model.parameters()))
    with pytest.raises(ValueError, match="2D or 3D"):
        model(torch.randn(2, 2, 2, 2))
    losses(model(time_first())).backward()  # type: ignore[no-untyped-call]
    assert rows.take() == BATCH
    assert not any(each._forward_pre_hooks for each in list(model.modules())[1:])
    rows.close()
    assert not any(each._forward_pre_hooks or each._forward_hooks for each in model.modules())


# ------------------------------------------------------------------------------------------------------ other models


def graph(self: Any, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor) -> Any:
    """Sums over neighbours, then over each graph."""
    x = self.net(x).index_add(0, edge_index[1], self.net(x)[edge_index[0]])
    return torch.zeros(2, x.size(1)).index_add(0, batch, x)


NODES, EDGES, GRAPHS = torch.randn(6, WIDTH), torch.tensor([[0, 1, 3], [1, 2, 4]]), torch.tensor([0, 0, 0, 1, 1, 1])


class FakeLanguageModel(nn.Module):
    """Takes embeddings in place of tokens, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9)

    def forward(
        self, input_ids: Any = None, inputs_embeds: Any = None, attention_mask: Any = None, labels: Any = None
    ) -> dict[str, torch.Tensor]:
        """The loss and the logits."""
        logits = self.head(self.words(input_ids) if inputs_embeds is None else inputs_embeds)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def twins(self: Any, left: torch.Tensor, right: torch.Tensor) -> Any:
    """One net for both sides of a pair."""
    return self.net(left) - self.net(right)


def frames(self: Any, video: torch.Tensor) -> Any:
    """A convolution for each picture of a film."""
    return self.net(video.flatten(0, 1)).mean((1, 2, 3)).unflatten(0, video.shape[:2]).mean(1)


@pytest.mark.parametrize(
    ("expected", "model", "batch"),
    [
        ("numbers of rows", Model(graph, net=head()), (NODES, EDGES, GRAPHS)),
        ("no tensor", Model(lambda self, g: self.net(g.x), net=head()), (SimpleNamespace(x=NODES),)),
        ("list of tensors", Model(lambda self, x: [self.net(each) for each in x], net=head()), ([NODES, NODES[:2]],)),
        (2, Model(lambda self, x: self.net(x)[1], net=nn.GRU(WIDTH, 2)), (pack_sequence([NODES, NODES[:2]]),)),
        (6, Model(lambda self, batch: self.net(batch["x"]), net=head()), ({"x": NODES, "y": torch.ones(6)},)),
        (2, FakeLanguageModel(), {"inputs_embeds": torch.randn(2, 5, WIDTH), "labels": torch.ones(2, 5).long()}),
        (2, FakeLanguageModel(), {"input_ids": torch.ones(2, 5).long(), "labels": torch.ones(2, 5).long()}),
        (6, Model(twins, net=head()), (NODES, NODES + 1)),
        ("numbers of rows", nn.EmbeddingBag(9, 3), (torch.tensor([1, 2, 4, 5]), torch.tensor([0, 1]))),
        (4, nn.EmbeddingBag(9, 3), (torch.ones(4, 2).long(),)),
        (2, Model(frames, net=nn.Conv2d(3, 2, 3)), (torch.randn(2, 5, 3, 8, 8),)),
        (6, Model(lambda self, x: checkpoint(self.net, x, use_reentrant=False), net=head()), (NODES,)),
        (6, nn.DataParallel(Model(one_by_one, net=head())), (NODES,)),
    ],
)
def test_the_samples_of_ten_kinds_of_models(expected: int | str, model: nn.Module, batch: Any) -> None:
    """Graphs, lists, sequences of other lengths, pairs, bags, films: the right number, or a question."""
    found = counted(model, batch)
    if isinstance(expected, int):
        assert found == expected
    else:
        assert isinstance(found, str)
        assert expected in found
        assert "batch_size_per_step" in found


class Opaque(torch.Tensor):
    """A tensor that does not say its sizes."""

    @property
    def shape(self) -> Any:  # type: ignore[override]
        """As torch's nested tensors do."""
        raise RuntimeError("no sizes")


class Lazy(dict[str, Any]):
    """A batch that is read from elsewhere."""

    def values(self) -> Any:
        """Not all at once."""
        raise OSError("cannot be listed")


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_broke_the_forward_of_the_model(layout: Any) -> None:
    """It has no sizes, but parts; each of them is a sample."""
    parts = torch.nested.nested_tensor([torch.randn(each, WIDTH) for each in (2, 3, 5)], layout=layout)
    model: Any = Model(lambda self, x: self.net(torch.nested.to_padded_tensor(x, 0.0)), net=head())
    assert counted(model, (parts,)) == 3
    assert counted(model, {"x": parts}) == 3
    inner: Any = Model(lambda self, x: torch.nested.to_padded_tensor(self.net(x), 0.0), net=head())
    assert counted(inner, (parts,)) == 3


@pytest.mark.parametrize("fixed", [None, 6])
def test_a_look_that_raises_broke_the_forward_of_the_model(fixed: int | None) -> None:
    """Of what cannot be looked at nothing is known, be it given to the model, to a layer, or returned."""
    plain = torch.randn(6, WIDTH)

    def inside(self: Any, x: torch.Tensor) -> Any:
        return self.net(x.as_subclass(Opaque)).as_subclass(torch.Tensor)

    for forward, given, is_known in (
        (lambda self, x: self.net(x.as_subclass(torch.Tensor)), plain.as_subclass(Opaque), True),  # by its first size
        (inside, plain, False),
        (lambda self, x: self.net(x["x"]), Lazy(x=plain), False),
        (lambda self, x: Lazy(y=self.net(x)), plain, False),
    ):
        model: Any = Model(forward, net=head())
        rows, warnings = rows_of(model, fixed, list(model.parameters())), list[str]()
        output = model(given)
        losses(output["y"] if isinstance(output, dict) else output).backward()  # type: ignore[no-untyped-call]
        if fixed is not None or is_known:
            assert samples_of(fixed, rows, warnings.append) == 6
            assert not warnings
        else:
            with pytest.raises(ConfigError, match=r"cannot be looked at.*batch_size_per_step"):
                samples_of(None, rows, warnings.append)
        assert rows is not None
        rows.close()


# ------------------------------------------------------------------------------------------------- sizes that are given


def told(given: int, model: nn.Module, *losses_of: Callable[[], Any], fixed: bool = True, **options: Any) -> list[str]:
    """The warnings of a step with these backward passes."""
    warnings: list[str] = []
    rows = rows_of(model, given if fixed else None, list(model.parameters()))
    for make in losses_of:
        losses(make()).backward()  # type: ignore[no-untyped-call]
    assert samples_of(given, rows, warnings.append, **options) == given
    assert rows is not None
    rows.close()
    return warnings


@pytest.mark.parametrize("fixed", [True, False])
def test_a_batch_size_that_is_not_that_of_the_batch_went_unnoticed(fixed: bool) -> None:
    """16 was said, and the model was given 64 rows: in one pass, or in four; or fewer, at the end of the data."""
    net = head()
    for rows, passes in ((64, 1), (16, 4), (5, 1)):
        batch = torch.randn(rows, WIDTH)
        (warning,) = told(16, net, *[lambda batch=batch: net(batch)] * passes, fixed=fixed)
        assert f"of 16 samples, and the model was given {rows * passes} rows" in warning
        assert f"batch_size={rows * passes}" in warning


@pytest.mark.parametrize("fixed", [True, False])
def test_the_right_batch_size_is_no_warning(fixed: bool) -> None:
    """Several passes, an evaluation between them, and one that is not differentiated."""
    net, x = head(), torch.randn(16, WIDTH)

    def evaluated() -> Any:
        net(torch.randn(1000, WIDTH))
        with torch.no_grad():
            net(torch.randn(500, WIDTH))
        return net(x)

    assert not told(16, net, lambda: net(x), fixed=fixed)
    assert not told(32, net, evaluated, evaluated, fixed=fixed)
    assert not told(3, net, lambda: net(x) - net(x + 1), fixed=fixed)  # not known


def test_samples_that_are_no_rows_are_no_warning() -> None:
    """Tokens, also those that are no padding; frames; and several passes for each sample, where two models train."""
    text, film = FakeLanguageModel(), Model(frames, net=nn.Conv2d(3, 2, 3))
    ids = torch.ones(8, 64).long()
    for given, fixed in ((512, True), (400, True), (90, False), (512, False)):
        assert not told(given, text, lambda: text(ids, labels=ids)["logits"], fixed=fixed)
    assert not told(1024, text, *[lambda: text(ids, labels=ids)["logits"]] * 2)
    assert told(16, text, lambda: text(ids, labels=ids)["logits"])
    assert not told(10, film, lambda: film(torch.randn(2, 5, 3, 8, 8)))
    critic, x = head(), torch.randn(16, WIDTH)
    assert not told(16, critic, lambda: critic(x), lambda: critic(x), may_be_pairs=True)
    assert told(16, critic, lambda: critic(x), lambda: critic(x))


def test_a_wrong_size_is_told_once_and_costs_nothing_after_a_while() -> None:
    """The hooks go when it was told, or was right for 100 steps."""
    for given, steps, warned in ((4, 1, 1), (6, 100, 0)):
        net, warnings = head(), list[str]()
        rows = rows_of(net, given, list(net.parameters()))
        for _ in range(steps):
            assert net._forward_hooks
            losses(net(NODES)).backward()  # type: ignore[no-untyped-call]
            samples_of(given, rows, warnings.append)
            net.zero_grad()
        assert not net._forward_hooks
        assert len(warnings) == warned
