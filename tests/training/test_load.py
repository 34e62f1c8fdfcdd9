from __future__ import annotations

from typing import Any

import pytest

from training.models import load


@pytest.mark.parametrize("answers", [True, False])
def test_a_hub_out_of_reach_is_asked_once_and_not_waited_for(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    asked: list[Any] = []

    def model_info(self: Any, name: str, timeout: float) -> None:
        asked.append((name, timeout))
        if not answers:
            raise ConnectionError("out of reach")

    def from_pretrained(source: str, **given: Any) -> None:
        asked.append((source, given["local_files_only"]))
        raise OSError("no such model.\nSecond line")

    monkeypatch.setattr(load.HfApi, "model_info", model_info)
    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    with pytest.raises(ValueError, match="model 'owner/name' cannot be loaded .*hub gives.: no such model$"):
        load.load_policy("owner/name")
    assert asked == [("owner/name", load.HUB_SECONDS), ("owner/name", not answers)]


def test_a_folder_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(load.HfApi, "model_info", lambda *given, **more: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match="OWNER/NAME"):
        load.load_policy(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"cannot be loaded \(a folder\)"):
        load.load_policy(tmp_path)
