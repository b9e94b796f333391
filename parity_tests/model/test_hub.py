"""A model of Hugging Face's hub: what its own library asks a server for, what is in its cache, and what cannot be had.

The server here speaks the part of the hub's protocol that `huggingface_hub` uses; `HF_ENDPOINT` is how mirrors are named.
"""

import functools
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jax_grpo.config import ConfigError
from jax_grpo.config.files import PACKAGED_MODELS, require_weights

REPOSITORY, COMMIT = "somebody/words", "0123456789" * 4
EXTRA = {"onnx/config.json": b"{}", "consolidated.safetensors": b"another copy", "pytorch_model.bin": b"pickle"}
DIRECTORIES = """
from jax_grpo.config.files import require_weights, weights_directory
require_weights("hub:somebody/words")
folder = weights_directory("hub:somebody/words")
print(sorted(path.name for path in folder.iterdir()))
assert weights_directory("hub:somebody/words", tensors=True) == folder
print(sorted(path.name for path in folder.iterdir()))
"""
LOGITS = """
import numpy as np
from jax_grpo.policy.named import describe_model, load_named
policies = [load_named(name) for name in ("hub:somebody/words@main", "packaged:words-small")]
assert policies[0].tokenizer.encode("one two") == policies[1].tokenizer.encode("one two")
described = describe_model("hub:somebody/words@main", policies[0])
assert described["sha256"] == describe_model("packaged:words-small", policies[1])["sha256"]
print(described["name"])
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers for one repository, whose files are by name; `asked` gets the paths of those that were downloaded."""

    def __init__(self, files, asked, *arguments):
        self.files, self.asked = files, asked
        super().__init__(*arguments)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{REPOSITORY}/"):
            if "/tree/" in path:
                found = [{"type": "file", "path": n, "size": len(c), "oid": "0"} for n, c in self.files.items()]
            else:
                found = {"id": REPOSITORY, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
            return self._send(json.dumps(found).encode(), {"Content-Type": "application/json"})
        name = path.removeprefix(f"/{REPOSITORY}/resolve/{COMMIT}/")
        if name not in self.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            return None
        if self.command == "GET":
            self.asked.append(name)
        return self._send(
            self.files[name], {"X-Repo-Commit": COMMIT, "ETag": hashlib.sha1(self.files[name]).hexdigest()}
        )

    def _send(self, content, headers):
        self.send_response(200)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path):
    """What runs Python with such a hub, and the names of the files that it was asked for."""
    folder, asked = PACKAGED_MODELS / "words-small", []
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} | EXTRA
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, files, asked))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}

    def run(program: str, **environment: str) -> subprocess.CompletedProcess:
        given = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=given | address | environment, capture_output=True, text=True, check=False)

    yield run, asked
    server.shutdown()


def test_settings_come_first_and_tensors_when_they_are_loaded_and_nothing_twice(hub):
    run, asked = hub
    done = run(DIRECTORIES)
    assert done.returncode == 0, done.stderr
    settings, whole = map(json.loads, done.stdout.replace("'", '"').splitlines())
    own = {path.name for path in (PACKAGED_MODELS / "words-small").iterdir()}
    assert "model.safetensors" not in settings and {*whole} == {*settings, "model.safetensors"} <= own
    assert {"config.json", "tokenizer.json"} <= {*settings}
    assert sorted(asked) == whole, "no copy in another format, and no file twice"
    asked.clear()
    done = run(LOGITS, HF_HUB_OFFLINE="1", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["somebody/words@main"] and not asked, "from the cache alone"


@pytest.mark.slow
def test_a_model_that_cannot_be_had_is_one_error_that_names_it(hub):
    run, _ = hub
    program = "from jax_grpo.config.files import require_weights\nrequire_weights('hub:somebody/{}')"
    for done, message in (
        (run(program.format("others")), "Repository Not Found"),
        (run(program.format("words"), HF_HUB_OFFLINE="1"), ""),
    ):
        last = done.stderr.strip().splitlines()[-1]
        assert (
            re.match(r"jax_grpo\.config\.loading\.ConfigError: model\.weights is 'hub:somebody/\w+': ", last)
            and message in last
        )


def test_without_the_hubs_library_the_error_says_how_it_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=re.escape("'hub:a/b', which needs: pip install 'jax_grpo[hub]'")):
        require_weights("hub:a/b")


def test_a_name_of_the_hub_without_its_prefix_is_refused_with_it():
    with pytest.raises(ConfigError, match=r"Of Hugging Face's hub\? Then give hub:Qwen/Qwen3-0\.6B\."):
        require_weights("Qwen/Qwen3-0.6B")
    with pytest.raises(ConfigError, match="does not exist") as caught:
        require_weights(str(Path("a/b/c")))
    assert "hub" not in str(caught.value)
