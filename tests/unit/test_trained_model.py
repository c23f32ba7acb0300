"""What peers compare of their models, and what is said about gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn.utils import prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import shoal
from shoal.errors import ConfigError
from shoal.run.view.progress import settings_difference
from shoal.train.gradient_watch import GradientWatch
from shoal.train.model import TrainedModel


def model(seed: int = 0) -> torch.nn.Sequential:
    """A frozen base, a normalization, two trained layers of equal shapes."""
    torch.manual_seed(seed)
    made = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    )
    made[0].requires_grad_(False)
    made.register_buffer("positions", torch.arange(4))
    return made


def settings(made: torch.nn.Sequential, order: tuple[int, ...] = (2, 3)) -> dict[str, str]:
    """Of a run that trains these layers."""
    trained = [parameter for layer in order for parameter in made[layer].parameters()]
    return TrainedModel(made, trained, []).settings()


def other_base(made: torch.nn.Sequential) -> None:
    """One frozen weight."""
    made[0].weight.data[0, 0] += 1e-6  # type: ignore[operator, index]


def other_buffer(made: torch.nn.Sequential) -> None:
    """One number of a buffer."""
    made.get_buffer("positions")[2] = 7


def statistics(made: torch.nn.Sequential) -> None:
    """Normalization has seen batches."""
    made(torch.ones(5, 3))


@pytest.mark.parametrize(
    ("change", "difference"),
    [(other_base, "frozen tensors is "), (other_buffer, "frozen tensors is "), (statistics, None)],
)
def test_peers_with_different_frozen_weights_are_refused_by_name(
    change: Callable[[torch.nn.Sequential], None], difference: str | None
) -> None:
    """LoRA over another base: the average of the adapters would fit neither."""
    one, other = model(), model()
    change(other)
    found = settings_difference(settings(one), settings(other))
    assert found is None if difference is None else found is not None and found.startswith(difference)
    assert found is None or ("the base model, under LoRA" in found and "torch.manual_seed(0)" in found)


def test_layers_in_another_order_are_refused_by_name() -> None:
    """Equal shapes: gradients of different layers would be averaged."""
    found = settings_difference(settings(model()), settings(model(), (3, 2)))
    assert found is not None
    assert found.startswith("parameter names is 4 from 2.weight to 3.bias")


def compiled_layers(made: torch.nn.Module) -> torch.nn.Module:
    """Each layer by itself."""
    for name, layer in list(made.named_children()):
        setattr(made, name, torch.compile(layer, backend="eager"))
    return made


def checkpointed_layers(made: torch.nn.Module) -> torch.nn.Module:
    """With activation checkpoints around them."""
    apply_activation_checkpointing(made, check_fn=lambda layer: isinstance(layer, torch.nn.Linear))
    return made


@pytest.mark.parametrize(
    "wrap",
    [partial(torch.compile, backend="eager"), torch.nn.DataParallel, compiled_layers, checkpointed_layers],
)
def test_a_model_that_is_wrapped_on_one_peer_has_the_same_names(wrap: Callable[[torch.nn.Module], Any]) -> None:
    """It was refused for its "parameter names": '_orig_mod.' or '_checkpoint_wrapped_module.' stood in each."""
    plain, wrapped = model(), wrap(model())
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    expected = TrainedModel(plain, [each for each in plain.parameters() if each.requires_grad], []).settings()
    assert TrainedModel(wrapped, trained, []).settings() == expected


def test_a_parameter_that_was_replaced_is_told() -> None:
    """The optimizer would go on training the one before, and the model stand still."""
    made = model()
    trained = TrainedModel(made, list(made[2].parameters()), [])
    made.load_state_dict(made.state_dict())
    trained.check()
    made.load_state_dict(made.state_dict(), assign=True)
    with pytest.raises(ConfigError, match=r"parameter 2\.weight of the model was replaced"):
        trained.check()


@pytest.mark.parametrize("given", ["weight", "bias"])
def test_a_layer_that_was_pruned_in_mid_run_had_a_mask_of_its_own_on_each_peer(given: str) -> None:
    """Each peer computed another function, without a word. Pruned before, a layer is as any other one."""
    made: Any = model()
    pruning: Any = prune
    trained = TrainedModel(made, list(made[2].parameters()), [])
    pruning.l1_unstructured(made[2], given, 0.5)
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"buffer 2\.{given}_mask came into the model after the optimizer"):
            trained.check()
    pruned = TrainedModel(made, list(made[2].parameters()), [])
    pruned.check()
    pruning.remove(made[2], given)
    trained.check()
    with pytest.raises(ConfigError, match=rf"buffer 2\.{given}_mask went out of the model"):
        pruned.check()


def test_a_parameter_that_was_replaced_at_one_of_its_places_is_told() -> None:
    """A tied one. Under another name in its layer it is the same one."""
    made: Any = model()
    trained = TrainedModel(made, list(made[2].parameters()), [])
    made[2].other = made[2].weight
    del made[2].weight
    made[2].register_buffer("cache", torch.zeros(2), persistent=False)
    trained.check()
    made[2].weight = made[2].other
    del made[2].other
    trained.check()
    made[3].weight = made[2].weight
    made[2].weight = torch.nn.Parameter(made[2].weight.detach().clone())
    with pytest.raises(ConfigError, match=r"parameter 2\.weight of the model was replaced"):
        trained.check()


def test_a_parameter_that_came_into_a_layer_later_is_told() -> None:
    """Only layers that came were looked for."""
    made: Any = model()
    trained = TrainedModel(made, list(made[2].parameters()), [])
    made[2].scale = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigError, match=r"2\.scale came into the model after the optimizer was made"):
        trained.check()


def test_a_layer_that_was_replaced_is_told() -> None:
    """A new head was neither trained nor shared, without a word; one that has nothing to train is no matter."""
    made = model()
    trained = TrainedModel(made, list(made[3].parameters()), [])
    made.append(torch.nn.ReLU())
    trained.check()
    made[3] = torch.nn.Linear(4, 2)
    with pytest.raises(ConfigError, match=r"the layer of 3\.weight was replaced in the model"):
        trained.check()


def test_a_layer_that_came_later_is_told() -> None:
    """A frozen one is no matter; one that is to be trained is."""
    made = model()
    trained = TrainedModel(made, list(made[3].parameters()), [])
    made.append(torch.nn.Linear(4, 2).requires_grad_(False))
    trained.check()
    made[1].add_module("adapter", torch.nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"1\.adapter\.weight came into the model after the optimizer was made"):
        trained.check()


def test_a_buffer_of_extra_tensors_that_was_replaced_is_told() -> None:
    """`model.to(dtype)` puts new buffers in their place: those of the run stood still."""
    made = model()
    trained = TrainedModel(made, list(made[2].parameters()), list(made[1].buffers()))
    made.to("cpu")
    trained.check()
    made[1].register_buffer("running_mean", torch.zeros(4))
    with pytest.raises(ConfigError, match=r"buffer 1\.running_mean of the model was replaced, and extra_tensors has"):
        trained.check()


def test_a_frozen_buffer_that_was_replaced_is_looked_at() -> None:
    """By another one with the same values, as when the model is moved, or with others."""
    made = model()
    trained = TrainedModel(made, list(made[2].parameters()), [])
    made.register_buffer("positions", torch.arange(4))
    assert not list(trained.changes())
    made.register_buffer("positions", torch.arange(4) + 1)
    assert list(trained.changes()) == ["positions"]


@pytest.mark.parametrize("layer", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_an_embedding_that_changes_its_weight_in_forward_is_refused(layer: Any) -> None:
    """`max_norm` writes into the rows that this peer's batch touches. Peers that step alone may."""
    made = torch.nn.Sequential(layer(5, 4, max_norm=1.0), torch.nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="0 of the model has max_norm"):
        TrainedModel(made, list(made.parameters()), [])
    TrainedModel(made, list(made.parameters()), [], steps_alone=True)
    TrainedModel(made, list(made[1].parameters()), [])


@pytest.mark.parametrize("normalize", [spectral_norm, old_spectral_norm])
@pytest.mark.filterwarnings("ignore:.*spectral_norm.* is deprecated")
def test_vectors_of_spectral_norm_are_statistics(normalize: Any) -> None:
    """Forward moves them: peers with other first ones were refused, and then each change was told as a mistake."""
    found = []
    for seed in (1, 2):
        made = torch.nn.Sequential(normalize(torch.nn.Linear(3, 4)), weight_norm(torch.nn.Linear(4, 4)))
        torch.manual_seed(seed)
        for buffer in made.buffers():
            torch.nn.init.normal_(buffer)
        trained = TrainedModel(made, list(made.parameters()), [])
        made(torch.ones(2, 3))
        assert not list(trained.changes())
        assert not trained.unshared_statistics, "they were called running statistics of normalization, to be averaged"
        found.append(trained.settings())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "make",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        torch.Tensor.to_sparse_csc,
        lambda values: torch.nested.nested_tensor([*values, torch.ones(3)]),
        lambda values: torch.nested.nested_tensor([*values, torch.ones(3)], layout=torch.jagged),
        lambda values: torch.quantize_per_tensor(values, 0.1, 0, torch.qint8),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of each sort that it is in beta, in other words
def test_buffers_of_any_sort_are_compared(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Sparse, nested and quantized ones raised errors of torch's own."""
    found = []
    for factor in (1, 1, 2):
        made = torch.nn.Linear(4, 1)
        made.register_buffer("extra", make(torch.eye(4) * factor))
        trained = TrainedModel(made, list(made.parameters()), [])
        assert not list(trained.changes())
        found.append(trained.settings())
    assert found[0] == found[1] != found[2]


def test_a_buffer_without_values_is_refused() -> None:
    """On the meta device."""
    made = torch.nn.Linear(4, 1)
    made.register_buffer("extra", torch.empty(4, device="meta"))
    with pytest.raises(ConfigError, match="extra of the model has no values yet"):
        TrainedModel(made, list(made.parameters()), [])


def test_a_frozen_weight_that_changes_in_mid_run_is_found() -> None:
    """Another base that is loaded later: what was compared when the peers met holds no more."""
    made = model()
    trained = TrainedModel(made, list(made[2].parameters()), [])
    made.load_state_dict(made.state_dict())  # the same values again
    statistics(made)
    assert not list(trained.changes())
    with torch.no_grad():
        made[0].weight.add_(0.1)  # type: ignore[operator]
    assert list(trained.changes()) == ["0.weight"]
    assert not list(trained.changes())


def test_a_momentum_encoder_within_the_model_is_told_in_one_line() -> None:
    """It was one warning for each of its tensors, at as many steps."""
    made = model()
    trained = TrainedModel(made, list(made[2].parameters()), [])
    with torch.no_grad():
        made[0].weight.add_(0.1)  # type: ignore[operator]
        made[0].bias.add_(0.1)  # type: ignore[operator]
    assert list(trained.changes()) == ["0.weight", "0.bias"]
    assert not list(trained.changes())


def test_what_another_run_trains_is_no_base() -> None:
    """Two optimizers of one model: what the other one trains was frozen, compared, and told whenever it moved."""
    made = model()
    one = TrainedModel(made, list(made[2].parameters()), [])
    first = one.settings()
    assert one.untrained == ["1.weight", "1.bias", "3.weight", "3.bias"]
    with torch.no_grad():
        for parameter in made[3].parameters():
            parameter.add_(1)
    other = TrainedModel(made, list(made[3].parameters()), [], elsewhere=made[2].parameters())
    one.shared_elsewhere(made[3].parameters())
    with torch.no_grad():
        for parameter in made[2].parameters():
            parameter.add_(1)
    assert not list(one.changes())
    assert not list(other.changes())
    assert one.untrained == other.untrained == ["1.weight", "1.bias"]
    assert TrainedModel(made, list(made[2].parameters()), []).settings() == first
    with torch.no_grad():
        made[1].bias.add_(1)  # type: ignore[operator]
    assert list(one.changes()) == ["1.bias"]


def test_statistics_that_another_run_shares_are_not_told() -> None:
    """They are in the extra tensors of the second one."""
    made = model()
    one = TrainedModel(made, list(made[2].parameters()), [])
    one.shared_elsewhere(made[1].buffers())
    assert not one.unshared_statistics


def test_another_model_than_the_optimizers_is_refused() -> None:
    """Nothing of it is trained."""
    with pytest.raises(ConfigError, match="none of the parameters"):
        TrainedModel(model(), list(model().parameters()), [])


def test_running_statistics_that_are_not_shared_are_found() -> None:
    """They belong into `extra_tensors`."""
    made = model()
    trained = list(made[2].parameters())
    assert TrainedModel(made, trained, []).unshared_statistics == ["1.running_mean", "1.running_var"]
    assert not TrainedModel(made, trained, list(made[1].buffers())).unshared_statistics


@pytest.mark.parametrize("clear", ["none", "zero", "by hand", "through .data", "forgotten"])
def test_gradients_counted_twice_for_want_of_zero_grad(clear: str) -> None:
    """Told once, and only who forgets it, however it is done."""
    layer = torch.nn.Linear(3, 1)
    watch = GradientWatch(list(layer.parameters()))
    told = []
    for _ in range(6):
        layer(torch.ones(2, 3)).sum().backward()
        layer(torch.ones(2, 3)).sum().backward()  # two batches in one step are no mistake
        told.append(watch.at_step())
        if clear in ("none", "zero"):
            layer.zero_grad(set_to_none=clear == "none")
        elif clear == "by hand":
            for parameter in layer.parameters():
                parameter.grad = torch.zeros_like(parameter)
        elif clear == "through .data":
            for parameter in layer.parameters():
                assert parameter.grad is not None
                parameter.grad.data.zero_()
    said = [each for each in told if each]
    assert len(said) == (clear == "forgotten")
    assert all("call optimizer.zero_grad() after each step()" in each for each in said)
    watch.close()


@pytest.mark.parametrize(
    ("scaler", "clear", "words"),
    [
        (torch.amp.GradScaler, None, "use a shoal.GradScaler, or step(grad_scaler=scaler)"),
        (torch.amp.GradScaler, True, ""),
        (torch.amp.GradScaler, False, ""),
        (shoal.GradScaler, None, ""),
    ],
)
def test_a_step_that_torchs_scaler_leaves_out_is_told(scaler: Any, clear: bool | None, words: str) -> None:
    """With `reuse_grad_buffers` nobody clears the gradients then: the scale fell to 0, without a word.

    Two passes before a step, of which one has an infinite loss, are no mistake; nor is a loop that clears them itself.
    """
    layer, told = torch.nn.Linear(3, 1), list[str]()
    watch = GradientWatch(list(layer.parameters()), tell=told.append)

    class Reuses(torch.optim.SGD):
        reuse_grad_buffers = True

        @property
        def _step_supports_amp_scaling(self) -> bool:  # type: ignore[override]
            watch.scaler_steps()
            return False

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            watch.at_step()
            self.zero_grad()

    optimizer, scales = Reuses(layer.parameters()), scaler("cpu", init_scale=1024.0)
    for number in range(10):
        if clear is not None:
            layer.zero_grad(set_to_none=clear)
        for factor in (torch.inf if number == 3 else 1.0, 1.0):
            scales.scale(layer(torch.ones(2, 3)).sum() * factor).backward()
        scales.step(optimizer)
        scales.update()
    assert len(told) == bool(words)
    assert words in "".join(told)
    assert (float(scales.get_scale()) < 100) == bool(words)
    watch.close()


@pytest.mark.parametrize("to_none", [True, False])
def test_the_loop_of_a_gan_clears_its_gradients(to_none: bool) -> None:
    """The generator's loss leaves gradients in the discriminator, which are cleared before its next batch."""
    judge, maker = torch.nn.Linear(3, 1), torch.nn.Linear(2, 3)
    watches = GradientWatch(list(judge.parameters())), GradientWatch(list(maker.parameters()))
    told = []
    for _ in range(6):
        judge.zero_grad(set_to_none=to_none)
        fake = maker(torch.ones(4, 2))
        judge(torch.ones(4, 3)).mean().backward()
        judge(fake.detach()).mean().backward()
        told.append(watches[0].at_step())
        maker.zero_grad(set_to_none=to_none)
        judge(fake).mean().backward()
        told.append(watches[1].at_step())
    assert told == [None] * 12


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_that_is_forgotten_later_is_told(to_none: bool) -> None:
    """Once in ten, long after the first steps."""
    layer = torch.nn.Linear(3, 1)
    watch = GradientWatch(list(layer.parameters()))
    told = []
    for number in range(40):
        layer(torch.ones(2, 3)).sum().backward()
        told.append(watch.at_step())
        if number % 10 != 5 or number < 20:
            layer.zero_grad(set_to_none=to_none)
    assert [number for number, each in enumerate(told) if each] == [26]
    watch.close()


def test_step_without_any_gradient_is_told_once() -> None:
    """Nothing was computed, or on another model."""
    watch = GradientWatch(list(torch.nn.Linear(3, 1).parameters()))
    told = [watch.at_step() for _ in range(3)]
    assert "call loss.backward() before" in (told[0] or "")
    assert told[1:] == [None, None]


def test_a_parameter_that_has_no_gradient_any_more_is_told_once() -> None:
    """Without the model nobody else sees that it was replaced."""
    layers = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    watch = GradientWatch([*layers[0].parameters(), *layers[1].parameters()])
    told = []
    for number in range(120):
        sum(layer(torch.ones(2, 3)).sum() for layer in layers[: 2 if number < 3 else 1]).backward()
        told.append(watch.at_step())
        for layer in layers:
            layer.zero_grad()
    assert [each for each in told if each] == [told[52]]
    assert "trained parameter 2 had gradients" in (told[52] or "")


def test_a_parameter_that_is_frozen_in_mid_run_is_no_mistake() -> None:
    """It has no gradient any more, as it is meant to."""
    layers = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
    watch = GradientWatch([*layers[0].parameters(), *layers[1].parameters()])
    for number in range(120):
        layers[1].requires_grad_(number < 3)
        sum(layer(torch.ones(2, 3)).sum() for layer in layers).backward()
        assert watch.at_step() is None
        for layer in layers:
            layer.zero_grad()


def test_a_large_sparse_gradient_that_travels_whole_is_told_once() -> None:
    """Not a small one, nor a dense one, nor where a codec was given."""
    large, small = torch.nn.Embedding(5000, 64, sparse=True), torch.nn.Embedding(50, 64, sparse=True)
    dense = torch.nn.Embedding(5000, 64)
    for layers, whole, told in (([small, large], True, 1), ([small, dense], True, 0), ([large], False, 0)):
        watch, messages = GradientWatch([each.weight for each in layers], whole=whole), list[str]()
        for _ in range(3):
            for each in layers:
                each.weight.grad = None
                torch.autograd.backward(each(torch.tensor([3, 7])).sum())
            messages += [message for message in [watch.at_step()] if message is not None]
        assert len(messages) == told, messages
        assert all("all its 5000 rows (1 MiB), touched or not" in each for each in messages)
