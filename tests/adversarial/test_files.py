"""Networks that other libraries read: the same logits there, and back again."""

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

from bilevax._cli.main import main
from bilevax.adversarial import Settings, build, export, load_images, load_network
from bilevax.adversarial.networks.models import MODELS, computing_in
from bilevax.adversarial.networks.network import statistics_mask
from bilevax.adversarial.training.training import train

REPOSITORY = Path(__file__).parent.parent.parent
SIDE = 16


def network(name, dtype="float32", activation="relu"):
    """A small one whose running statistics are not those of the start."""
    made = build(
        name, key=jax.random.key(3), classes=5, channels=3, mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.25, 0.3), dtype=dtype, activation=activation, width=4,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda is_statistic, leaf: (
            leaf + rng.uniform(0.1, 0.5, leaf.shape).astype(leaf.dtype)
            if is_statistic
            else leaf
        ),
        statistics_mask(made),
        made,
    )


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(1).uniform(size=(6, SIDE, SIDE, 3)).astype("float32")


def logits(model, pixels):
    return np.asarray(model(pixels, training=False)[0])


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_a_network_comes_back_from_safetensors_as_it_was(name, tmp_path):
    pytest.importorskip("safetensors", reason="the extra `export` is not installed")
    for dtype, activation in (("float32", "relu"), ("bfloat16", "silu")):
        model = network(name, dtype, activation)
        path = tmp_path / f"{dtype}.safetensors"
        export(model, path)
        again = load_network(path)
        assert same(model, again)
        assert jax.tree.structure(model) == jax.tree.structure(again)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("activation", ["relu", "softplus", "silu"])
def test_torch_finds_the_same_logits_in_safetensors(name, activation, tmp_path, pixels):
    pytest.importorskip("safetensors", reason="the extra `export` is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    model = network(name, activation=activation)
    path = tmp_path / "model.safetensors"
    export(model, path)
    scope = runpy.run_path(str(REPOSITORY / "examples" / "torch_networks.py"))
    theirs = scope["load"](path)
    with torch.no_grad():
        found = theirs(torch.tensor(pixels.transpose(0, 3, 1, 2))).numpy()
    expected = logits(model, pixels)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", MODELS)
def test_onnx_gives_the_same_logits_for_any_batch(name, tmp_path, pixels):
    pytest.importorskip("jax2onnx", reason="the extra `onnx` is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    # A network that computes in bfloat16 is written in float32, with the same weights.
    model = network(name, "bfloat16" if name == "small" else "float32")
    path = tmp_path / "model.onnx"
    export(model, path, image_shape=(SIDE, SIDE, 3))
    session = runtime.InferenceSession(str(path))
    expected = logits(computing_in(model, "float32"), pixels)
    for count in (1, 6):
        given = {session.get_inputs()[0].name: pixels[:count].transpose(0, 3, 1, 2)}
        found = session.run(None, given)[0]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found, expected[:count], atol=2e-5 * scale)


def test_what_is_no_such_file_is_refused_with_its_cause(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    model = network("small")
    path = tmp_path / "model.safetensors"
    export(model, path)
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"\x80\x04" + whole, whole[:4]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="damaged or holds another network"):
            load_network(path)
    # Headers that are fine, and arrays that do not fit.
    arrays = safetensors.load(whole)
    with_text = lambda arrays, text: path.write_bytes(safetensors.save(arrays, text))
    built: Any = {"bilevax.network": json.dumps(dict(name="small", width=4))}
    weight = "conv1.weight"
    for changed, text, told in (
        (arrays, None, "does not say which network"),
        (arrays, {"bilevax.network": "[]"}, "does not say how to build"),
        (arrays, {"bilevax.network": "{"}, "damaged"),
        (arrays, built, "missing"),
        (arrays | dict(more=arrays[weight]), dict(), "'more', which the network"),
        ({k: v for k, v in arrays.items() if k != weight}, dict(), f"no '{weight}'"),
        (arrays | {weight: arrays[weight][:1]}, dict(), "of shape"),
        (arrays | {weight: arrays[weight] * np.nan}, dict(), "are not finite"),
    ):
        with_text(changed, text)
        like = model if text == {} else None
        with pytest.raises(ValueError, match=told):
            load_network(path, like=like)
    with pytest.raises(ValueError, match="does not exist"):
        load_network(tmp_path / "other.safetensors")


def test_mistakes_of_an_export_are_told(tmp_path):
    model = network("small")
    with pytest.raises(ValueError, match=r"ends in \.safetensors or \.onnx"):
        export(model, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="needs `image_shape`"):
        export(model, tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="has 1 channels, the network 3"):
        export(model, tmp_path / "model.onnx", image_shape=(8, 8, 1))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    digits = load_images("digits")
    images = dataclasses.replace(
        digits, x_train=digits.x_train[:200], y_train=digits.y_train[:200]
    )
    settings = Settings(
        model="small", width=4, epsilon=0.1, epochs=1, batch_size=50, padding=0,
        flip=False, validation=50,
    )  # fmt: skip
    return folder, train(images, settings, folder=folder), settings


def test_the_command_exports_what_the_run_has_left(finished, tmp_path, capsys):
    pytest.importorskip("safetensors", reason="the extra `export` is not installed")
    folder, trained, _ = finished
    for kind, expected in (
        ("average", trained.average),
        ("last", trained.model),
        ("best", trained.best),
    ):
        path = tmp_path / f"{kind}.safetensors"
        assert main(["export", str(folder), "--to", str(path), "--weights", kind]) == 0
        assert same(load_network(path), expected)
        assert f"{kind} weights" in capsys.readouterr().out
    assert main(["export", str(folder), "--to", str(tmp_path / "model.pt")]) == 1
    assert "ends in .safetensors or .onnx" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "--to", "model.safetensors"]) == 1
    assert "settings.json" in capsys.readouterr().err


def test_the_command_exports_onnx_for_the_images_of_the_run(finished, tmp_path):
    pytest.importorskip("jax2onnx", reason="the extra `onnx` is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    folder, trained, _ = finished
    path = tmp_path / "model.onnx"
    assert main(["export", str(folder), "--to", str(path)]) == 0
    session = runtime.InferenceSession(str(path))
    pixels = load_images("digits").x_test[:3].astype("float32") / 255
    given = {session.get_inputs()[0].name: pixels.transpose(0, 3, 1, 2)}
    found = session.run(None, given)[0]
    np.testing.assert_allclose(found, logits(trained.average, pixels), atol=1e-4)


def test_the_card_says_what_was_done_and_what_was_not(finished):
    folder, _, settings = finished
    card = (folder / "model_card.md").read_text()
    for told in ("digits", "200 training images of 8 x 8 x 1", "50 of them kept back"):
        assert told in card
    recorded = json.loads(card.split("```json")[1].split("```")[0])
    assert recorded == settings.as_row()
    assert "Any attack on images that were not trained on." in card
    assert card.rstrip().endswith("To be filled in by whoever passes the weights on.")


def test_the_card_of_the_command_has_the_accuracies(tmp_path, capsys):
    out = tmp_path / "run"
    command = [
        "train", "--json", "--dataset", "digits", "--model", "small", "--width", "4",
        "--epsilon", "1/8", "--epochs", "1", "--batch-size", "100", "--padding", "0",
        "--no-flip", "--held-out", "300", "--restarts", "1", "--no-ensemble",
        "--out", str(out),
    ]  # fmt: skip
    assert main(command) == 0
    scores = json.loads(capsys.readouterr().out)
    card = (out / "model_card.md").read_text()
    assert "On 300 held-out training images, attacked within 0.125" in card
    for kind in ("raw", "averaged"):
        shown = f"{scores[kind]['clean']:.2%} | {scores[kind]['pgd']:.2%} | –"
        assert shown in card
    assert "Any attack but PGD" in card


def test_a_network_of_your_own_comes_back_with_one_of_its_shapes(tmp_path):
    pytest.importorskip("safetensors", reason="the extra `export` is not installed")

    class Mine(type(network("small"))):
        """Not one that `build` knows."""

    template = network("small")
    mine = Mine.__new__(Mine)
    for field in dataclasses.fields(template):
        object.__setattr__(mine, field.name, getattr(template, field.name))
    path = tmp_path / "mine.safetensors"
    export(mine, path)
    blank = eqx.tree_at(lambda m: m.head.bias, mine, mine.head.bias * 0)
    assert same(load_network(path, like=blank), mine)
    with pytest.raises(ValueError, match="does not say which network"):
        load_network(path)
