"""A model that was trained in any layout is exported by its ranks, and loaded by `from_pretrained` as it was."""

import json

import pytest
import torch
from later import Later
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import bandmaster as bm
from bandmaster import Dispatch, Mesh, register, rl

transformers = Later("transformers")
# What the workers of these tests would each import.
PRELOAD = ["torch._dynamo", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama"]
TOKENS = torch.arange(12).view(2, 6)
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 48}


@pytest.fixture(autouse=True, scope="module")
def loaded():
    """The process that has imported these modules stays from test to test, as a group does that it has started."""
    transformers.utils.logging.disable_progress_bar()  # it would leave a thread
    with bm.ResourcePool([1], preload=PRELOAD) as pool, bm.WorkerGroup(pool, bm.Worker):
        yield


def llama(is_tied=False):
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=4, tie_word_embeddings=is_tied)
    ).eval()


class Holder(bm.Worker):
    """A model that is cut along tp, and along dp if that is more than one rank."""

    def __init__(self, is_tied=False):
        self.model = llama(is_tied)
        mesh = rl.device_mesh(self, "dp", "tp")
        if self.mesh.axis_size("tp") > 1:
            plan = {"self_attn.q_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel()}
            plan |= {"mlp.gate_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
            for layer in self.model.model.layers:
                parallelize_module(layer, mesh["tp"], plan)
        if self.mesh.axis_size("dp") > 1:
            fully_shard(self.model, mesh=mesh["dp"])

    @register(Dispatch.ONE_TO_ALL)
    def export(self, folder, **options):
        rl.export(folder, self.model, **options)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def assert_same(folder, expected):
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(loaded) is type(expected)
    assert torch.equal(logits(loaded), logits(expected))


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(dp=4, tp=1), Mesh(dp=1, tp=2)], ids=str)
def test_any_layout(tmp_path, mesh):
    with bm.ResourcePool([mesh.size], preload=PRELOAD) as pool:
        group = bm.WorkerGroup(pool, Holder, mesh=mesh)
        with bm.trace() as trace:
            group.export(str(tmp_path / "one"))
            group.export(str(tmp_path / "several"), file_nbytes=20_000)
        assert sum(call.sent_nbytes + call.returned_nbytes for call in trace.calls) < 10_000, (
            "the controller has nothing"
        )
    assert_same(tmp_path / "one", llama())
    assert_same(tmp_path / "several", llama())
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in llama().state_dict().values())
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()


class Vocabulary:
    def save_pretrained(self, folder):
        (folder / "words.txt").write_text("a b")


def test_what_belongs_to_a_model_is_in_its_folder_and_whole_numbers_stay_whole(tmp_path):
    model = llama()
    model.register_buffer("steps", torch.arange(3))
    rl.export(tmp_path, model, tokenizer=Vocabulary(), dtype=torch.bfloat16)
    assert (tmp_path / "words.txt").read_text() == "a b"
    assert {"config.json", "generation_config.json"} <= {path.name for path in tmp_path.iterdir()}
    found = load_file(tmp_path / "model.safetensors")
    assert found["steps"].tolist() == [0, 1, 2] and found["steps"].dtype == torch.int64
    assert {tensor.dtype for name, tensor in found.items() if name != "steps"} == {torch.bfloat16}


def test_tied_weights_and_another_dtype_in_one_process(tmp_path):
    model = llama(is_tied=True)
    rl.export(tmp_path, model, dtype=torch.bfloat16, file_nbytes=20_000)
    rl.export(tmp_path, model, dtype=torch.bfloat16)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"], "the old files are gone"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())


def test_weights_that_transformers_holds_fused_are_written_as_the_models_checkpoints_have_them(tmp_path):
    model = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_key_value_heads=4, num_local_experts=4)
    ).eval()
    rl.export(tmp_path, model, file_nbytes=20_000)
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert any("experts.3.w1" in name for name in names)
    assert_same(tmp_path, model)


def test_a_model_without_a_configuration(tmp_path):
    with pytest.raises(bm.UsageError, match=r"must be one of transformers.*got Linear.*rl\.save"):
        rl.export(tmp_path, torch.nn.Linear(2, 2))
    with pytest.raises(bm.UsageError, match="file_nbytes must be at least 1, got 0"):
        rl.export(tmp_path, llama(), file_nbytes=0)
