"""What comes from elsewhere is read and never run, and what is written is the user's alone. Ruff's rules (`S` in
pyproject.toml) hold the rest: no `exec`, no pickles, no shells, no unsafe YAML, no ports that are open to all.
"""

import ast
import json
import os
import stat
from pathlib import Path

import pytest
import torch

from tests.support import zoo
from tests.support.models.pairs import small
from tunecompile.cli.compare import models
from tunecompile.cli.compare.spec import Job
from tunecompile.cli.options import parse_address
from tunecompile.compiler import tuning_cache
from tunecompile.compiler.compile_cache import make_private
from tunecompile.errors import NoConfig
from tunecompile.estimate.meta_model import find_config
from tunecompile.integrations.export.adapter import load as load_adapter

ROOT = Path(__file__).parents[1]
TRUST = ("trust_remote_code", "allow_pickle")


def sources() -> dict[str, str]:
    files = {file.resolve() for name in ("tunecompile", "passes", "templates") for file in (ROOT / name).rglob("*.py")}
    return {str(file): file.read_text(encoding="utf-8") for file in files}


def careless(path: str, source: str) -> list[str]:
    """Calls that trust what they read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        name = ast.unparse(node.func)
        if any(word in given for word in TRUST) or (name == "torch.load" and given.get("weights_only") != "True"):
            found.append(f"{path}:{node.lineno}: {name}")
        if isinstance(node.func, ast.Name) and node.func.id == "eval":
            found.append(f"{path}:{node.lineno}: eval")
    return found


def test_nothing_is_trusted_for_the_user():
    assert len(sources()) > 100
    assert [call for path, source in sources().items() for call in careless(path, source)] == []
    planted = (
        "torch.load(path)\nAutoModel.from_pretrained(path, trust_remote_code=True)\nnumpy.load(f, allow_pickle=True)"
    )
    assert len(careless("planted.py", planted)) == 3
    assert "trust_remote_code" not in {word for source in sources().values() for word in strings(source)}


def strings(source: str) -> set[str]:
    """String constants, by which a keyword could be given in a dictionary."""
    return {
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and type(node.value) is str
    }


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.fixture
def traps(tmp_path):
    """A model with code, one with pickled weights, and an adapter with pickled weights; each leaves a mark if run."""
    pytest.importorskip("peft")
    mark = tmp_path / "mark"
    folders = [tmp_path / name for name in ("code", "pickled", "adapter")]
    code, pickled, adapter = folders
    code.mkdir()
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tok", None]}
    (code / "config.json").write_text(json.dumps({"model_type": "its-own", "auto_map": classes}))
    (code / "tokenizer_config.json").write_text(json.dumps({"auto_map": classes, "tokenizer_class": "Tok"}))
    (code / "own.py").write_text(f"import os; os.mkdir({str(mark)!r})\n")
    model = small()
    model.save_pretrained(tmp_path / "base")
    model.config.save_pretrained(pickled)
    zoo.adapt(model).save_pretrained(adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps({**settings, "task_type": "CAUSAL_LM", "base_model_name_or_path": str(tmp_path / "base")})
    )
    (adapter / "adapter_model.safetensors").unlink()
    torch.save({"weight": Trap(mark)}, pickled / "pytorch_model.bin")
    torch.save({"weight": Trap(mark)}, adapter / "adapter_model.bin")
    return (*folders, mark)


PICKLED = "(?i)weights.only"


@pytest.mark.filterwarnings("ignore")
def test_code_and_pickles_of_a_model_folder_are_not_run(traps, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "n")  # transformers asks at a terminal
    code, pickled, adapter, mark = traps
    with pytest.raises(NoConfig, match="custom code"):
        find_config(str(code))
    for load in (models.load_base, models.load_tokenizer):
        with pytest.raises(ValueError, match="custom code"):
            load(Job("eager", str(code), mode="full"))
    with pytest.raises(Exception, match=PICKLED):
        models.load_base(Job("eager", str(pickled), mode="full"))
    with pytest.raises(Exception, match=PICKLED):
        load_adapter(adapter)
    assert not mark.exists()
    torch.load(adapter / "adapter_model.bin", weights_only=False)
    assert mark.exists(), "the trap works"


@pytest.mark.skipif(os.name == "nt", reason="modes are those of POSIX")
def test_folders_of_caches_are_the_users_own(tmp_path, monkeypatch):
    def mode(path):
        return stat.S_IMODE(path.stat().st_mode)

    (tmp_path / "theirs").mkdir(mode=0o755)
    monkeypatch.setattr(tuning_cache, "cache_folder", lambda: tmp_path / "theirs" / "inductor")
    tuning_cache.keep("test", {"a": 1}, 2, lambda value: value == 2)
    made = [tmp_path / "theirs" / "inductor", tmp_path / "theirs" / "inductor" / "tunecompile"]
    assert [mode(path) for path in made] == [0o700] * 2 and mode(tmp_path / "theirs") == 0o755
    make_private(made[0])  # what is there stays


def test_ports_are_local_unless_an_address_is_given():
    assert parse_address("9400") == ("127.0.0.1", 9400) and parse_address("0.0.0.0:9400")[0] == "0.0.0.0"
