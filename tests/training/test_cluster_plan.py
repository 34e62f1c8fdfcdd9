"""The memory and time plan, against sizes that are published and numbers worked out by hand."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from training.cluster.dry_run import dry_run, method_extra, needs_reference, resolve
from training.cluster.gpus import GPUS
from training.cluster.layout import ClusterConfig, Layout
from training.cluster.load import step_work
from training.cluster.plan import GIB, LOGITS, Extra, Plan, plan
from training.cluster.shapes import SHAPES, TINY, Shape, shape_of
from training.config import RECIPES, Config
from training.method import Needs
from training.settings import with_method

THREE, SEVEN, SMALL = (SHAPES[f"Qwen/{name}"] for name in ("Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct", "Qwen3-1.7B"))


def recipe(name: str) -> Config:
    return with_method(RECIPES[name], RECIPES[name].method)


def items(found: Plan, phase: str) -> dict[str, float]:
    return {item.name: item.gib for item in found.items if item.phase == phase}


def test_parameter_counts_are_the_published_ones() -> None:
    assert THREE.parameters == 3_085_938_688
    assert SEVEN.parameters == 7_615_616_512
    assert SMALL.parameters == 1_720_574_976
    assert SHAPES["Qwen/Qwen3-8B"].parameters == 8_190_735_360


def test_bytes_of_a_cached_token() -> None:
    assert THREE.kv_bytes == 2 * 36 * 2 * 128 * 2 == 36_864  # keys and values, blocks, heads, dimensions, bytes
    assert SEVEN.kv_bytes == 57_344 and SMALL.kv_bytes == 114_688


def test_sizes_come_from_a_folder_too(tmp_path: Path) -> None:
    with safe_open(TINY / "model.safetensors", "np") as weights:  # its head is tied: stored once
        stored = sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    assert shape_of("tiny").parameters == stored
    config = {"model_type": "qwen3", "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16}
    config |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936}
    config |= {"tie_word_embeddings": True, "max_position_embeddings": 40960}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_of(str(tmp_path)) == SMALL
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gemma3"}))
    with pytest.raises(ValueError, match="gemma3"):
        shape_of(str(tmp_path))
    with pytest.raises(ValueError, match="nobody/nothing"):
        shape_of("nobody/nothing")


def test_the_projector_is_counted_from_the_method_itself() -> None:
    extra = method_extra(recipe("paper-alfworld-3b-pr-opd"), THREE)
    assert extra.parameters == 36 * (2 * 2048 * 512 + 512 + 2048) == 75_589_632
    assert extra.needs.states == "before" and extra.needs.skill == "hindsight"  # of Stage II
    assert method_extra(recipe("paper-alfworld-1.7b-pr-opd"), SMALL).parameters == 58_791_936
    assert method_extra(recipe("paper-alfworld-3b-sdar"), THREE).parameters == 0


def test_items_of_one_layout_by_hand() -> None:
    config = recipe("paper-alfworld-3b-grpo")
    cluster = ClusterConfig(8, 1, "H100-80GB")
    found = plan(config, Extra(Needs()), THREE, cluster, Layout("none", 1, 8192, 0.5))
    update, rollout = items(found, "update"), items(found, "rollout")
    share = 3_085_938_688 / 8 / 2**30
    assert update["weights, float32"] == pytest.approx(4 * share) == pytest.approx(1.437, abs=1e-3)
    assert update["gradients, float32"] == pytest.approx(4 * share)
    assert update["AdamW moments, float32"] == pytest.approx(8 * share)
    assert update["gathered weights, bfloat16"] == pytest.approx(2 * (151936 * 2048 + 2048 + 2 * 77_076_992) / GIB)
    kept, block = 36 * 2048 * 2, (10 * 2048 + 4 * 11008) * 2
    assert update["activations, recomputed by block"] == pytest.approx(8192 * (kept + block) / GIB)
    assert rollout["vLLM: weights and cache"] == 39.5
    assert rollout["weights and AdamW moments, float32"] == pytest.approx(12 * share)
    assert found.peak == pytest.approx(max(sum(update.values()), sum(rollout.values())))
    cache = 39.5 * 0.95 - 2 * 8 * share - 1.5  # GiB beside vLLM's own weights
    assert found.sequences == int(cache * GIB / (36_864 * 2560))
    assert found.live == 16
    assert found.host == pytest.approx((4 + 12) * share * 8)  # the reference, and a checkpoint that is gathered


def test_twice_the_gpus_halve_what_is_sharded_and_nothing_else() -> None:
    config, layout = recipe("paper-alfworld-3b-pr-opd"), Layout("none", 1, 8192, 0.5)
    extra = method_extra(config, THREE)
    four, eight = (
        items(plan(config, extra, THREE, cluster, layout), "update") for cluster in (ClusterConfig(4), ClusterConfig(8))
    )
    sharded = {"weights, float32", "gradients, float32", "AdamW moments, float32"}
    assert four.keys() == eight.keys()
    for name in four:
        assert four[name] == pytest.approx(eight[name] * (2 if name in sharded else 1))


def test_what_a_method_adds() -> None:
    cluster, layout = ClusterConfig(8), Layout("none", 1, 8192, 0.5)

    def names(method: str) -> set[str]:
        config = recipe(f"paper-alfworld-3b-{method}")
        return set(items(plan(config, method_extra(config, THREE), THREE, cluster, layout), "update"))

    extra = names("pr-opd") - names("grpo")
    assert extra == {
        "hidden states of both branches",
        "method's modules with AdamW, float32",
        "method's modules, activations",
    }
    assert names("sdar") == names("grpo")  # its teacher is read ahead, by the policy itself
    frozen = plan(
        recipe("paper-alfworld-3b-grpo"), Extra(Needs(teacher="rollout", states="at")), THREE, cluster, layout
    )
    assert "weights of the rollout, float32" in items(frozen, "update")


@pytest.mark.parametrize(
    "name", [name for name in RECIPES if name.startswith("paper-") and RECIPES[name].model.device == "cuda"]
)
def test_every_row_fits_on_eight_h100(name: str) -> None:
    _, found = resolve(recipe(name), ClusterConfig(8, 1, "H100-80GB"))
    assert found is not None and found.fits and found.layout.offload == "none", found


def test_small_gpus_give_up_what_is_fast_first() -> None:
    config = recipe("paper-alfworld-7b-sdar")
    seen = [resolve(config, ClusterConfig(gpus, 1, "A100-80GB"))[1] for gpus in (8, 4, 1)]
    assert [found.layout.offload for found in seen if found] == ["none", "none", "cpu"]
    assert seen[2] is not None
    assert seen[2].host == pytest.approx((16 + 4 + 12) * SEVEN.parameters / GIB)  # offloaded, reference, checkpoint
    tight = resolve(config, ClusterConfig(1, 1, "RTX-4090"))[1]
    assert tight is not None and not tight.fits and "does not fit" in tight.verdict


def test_the_longest_row_always_fits_into_a_micro_batch() -> None:
    config = recipe("paper-webshop-3b-pr-opd")
    for gpu in GPUS:
        layout, _ = resolve(config, ClusterConfig(1, 1, gpu))
        assert 4608 + 1024 <= layout.micro_tokens <= config.optim.micro_batch_tokens


def test_the_count_of_logits_is_the_reader_s() -> None:
    from diagnostics.forward import LOGIT_ELEMENTS

    assert LOGITS == LOGIT_ELEMENTS


def test_a_step_by_hand() -> None:
    config = recipe("paper-alfworld-3b-grpo")
    work = {w.name: w for w in step_work(config, Extra(Needs()), THREE, ClusterConfig(8), Layout("none", 1, 8192, 0.5))}
    rows = 128 * 42.5
    assert work["read: reference"].tokens == rows * 637
    seconds = 2 * 3_085_938_688 * rows * 637 / (8 * 989e12 * 0.12)
    assert work["read: reference"].seconds == pytest.approx(seconds) == pytest.approx(22.5, abs=0.1)
    assert work["update (22 optimiser steps)"].seconds == pytest.approx(4 * seconds)
    assert work["play"].seconds > 50 * 137 * 0.015
    assert set(work) == {"play", "read: own log-probs", "read: reference", "update (22 optimiser steps)"}


def test_public_logs_lie_within_a_factor_of_two() -> None:
    """Means of the first 30 steps of public 3B GRPO runs on eight GPUs: rollout, one reading, update (seconds)."""
    for env, measured in (("alfworld", (199, 17, 70)), ("webshop", (99, 24, 103))):
        config = recipe(f"paper-{env}-3b-grpo")
        work = step_work(config, Extra(Needs()), THREE, ClusterConfig(8, 1, "H800-80GB"), Layout("none", 1, 8192, 0.5))
        said = (work[0].seconds, work[1].seconds, work[-1].seconds)
        assert all(0.5 < a / b < 2 for a, b in zip(said, measured, strict=True)), (env, said)


def test_a_teacher_costs_a_reading_and_hindsight_a_writing() -> None:
    config = recipe("paper-alfworld-3b-pr-opd")
    cluster, layout = ClusterConfig(8), Layout("none", 1, 8192, 0.5)
    base = sum(w.seconds for w in step_work(config, Extra(Needs()), THREE, cluster, layout))
    second = step_work(config, method_extra(config, THREE), THREE, cluster, layout)
    assert {"write skills", "read: teacher with the skill"} <= {w.name for w in second}
    assert 1.05 < sum(w.seconds for w in second) / base < 3


def test_the_reference_is_asked_for_where_a_step_reads_it() -> None:
    config = recipe("paper-alfworld-3b-grpo")
    without = replace(config, objective=replace(config.objective, kl_coefficient=0.0))
    assert needs_reference(config) and not needs_reference(without)
    pcsd = with_method(without, "pcsd")  # its teacher is the policy the run started from
    assert needs_reference(pcsd)


def test_a_dry_run_says_all_of_it(tmp_path: Path) -> None:
    config = recipe("paper-alfworld-3b-pr-opd")
    said = dry_run(config, tmp_path / "run", ClusterConfig(8), config.model.name)
    assert said.plan is not None and said.verdict.startswith("fits")
    assert "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct" in said.command
    assert any("memory of one H100-80GB" in title for title in said.tables) and len(said.tables) == 4
    with pytest.raises(ValueError, match="H100-80GB"):
        dry_run(config, tmp_path, ClusterConfig(gpu="H100"), "x")


def test_a_model_of_unknown_sizes_still_gets_a_command(tmp_path: Path) -> None:
    config = recipe("paper-alfworld-grpo")
    config = replace(config, model=replace(config.model, name="nobody/nothing", device="cuda"))
    said = dry_run(config, tmp_path, ClusterConfig(1), "nobody/nothing")
    assert said.plan is None and "nobody/nothing" in said.verdict and "max_model_len=4608" in said.command


def test_nothing_heavy_is_imported_for_the_plan() -> None:
    code = (
        "import sys; import training.cluster.plan, training.cluster.load, training.cluster.verl_config; "
        "print([name for name in ('torch', 'verl', 'ray', 'vllm') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_cluster_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="1 or more"):
        ClusterConfig(gpus=0)


def test_an_untied_head_counts_twice() -> None:
    tied = Shape(64, 2, 4, 2, 128, 100, 16, True, 512)
    assert replace(tied, tied=False).parameters - tied.parameters == 100 * 64
