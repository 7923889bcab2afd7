import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, bad, environment, write_commands

from scripts.bench import BenchOptions
from scripts.kernels import kind_of, print_tables, summarize
from utils.cli import parse

PEER = """
import torch
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = torch.nn.Embedding(config.vocab_size, config.n_embd)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        print("a peer that speaks")
        return torch.optim.AdamW(self.parameters(), learning_rate, betas)

    def forward(self, idx, targets):
        logits = self.wte(idx) @ self.wte.weight.T
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
TINY = "--n_layer 2 --n_head 2 --n_embd 32 --block_size 256 --micro_batch_size 1 --device cpu"
SHORT = "--repeats 1 --seconds 0"


@pytest.mark.slow
def test_training_is_measured_beside_a_peer(tmp_path):
    (tmp_path / "model.py").write_text(PEER)
    args = f"scripts/bench.py {TINY} {SHORT} --profile --peer".split()
    # a Python of its own: it starts processes, which a fork of the tests' server may not
    command = [sys.executable, *args, tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=environment(), text=True, capture_output=True)
    row = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = row["measured"]["ours"], row["measured"]["nanogpt"]
    assert row["ratio"] == pytest.approx(ours["rate"] / theirs["rate"])
    assert row["memory_ratio"] == pytest.approx(ours["peak_bytes"] / theirs["peak_bytes"])
    assert all(10**8 < figures["peak_bytes"] < 10**10 for figures in (ours, theirs))
    assert all(figures["kind_ms"]["matmul"] > 0 for figures in (ours, theirs))
    assert row["options"]["n_layer"] == 2 and row["device"] == "cpu"


def test_a_peer_that_is_not_there_is_named_before_the_first_measurement(tmp_path):
    bad(["scripts/bench.py", "--peer", tmp_path], f"--peer {tmp_path} holds no model.py")


@pytest.mark.parametrize(
    "kind, kernels",
    [
        (
            "matmul",
            "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNT aten::addmm aten::mm aten::bmm "
            "sm90_xmma_gemm_bf16f32_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1 "
            "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8 "
            "cublasLt::splitKreduce_kernel mkldnn::_linear_pointwise triton_tem_fused_mm_3",
        ),
        (
            "attention",
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x128x64 "
            "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t> "
            "cudnn::fusion::compute_dot_do_o_specialized fmha_cutlassF_bf16_aligned_64x64_rf_sm80 "
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        ),
        (
            "loss",
            "triton_red_fused__to_copy_add_arange_copy_copy__eq_exp_ge_log_masked_fill_mul_"
            "prepare_softmax_online_scalar_tensor_squeeze_sub_sum_unsqueeze_where_0 "
            "aten::_softmax aten::amax",
        ),
        (
            "norms and residual",
            "triton_per_fused__to_copy_add_native_layer_norm_native_layer_norm_backward_view_13 "
            "triton_per_fused__fused_rms_norm__to_copy__unsafe_view_add_cat_mul_split_sub_view_2 "
            "triton_poi_fused__unsafe_view_add_8 aten::native_layer_norm aten::add",
        ),
        (
            "activation",
            "triton_poi_fused_gelu_gelu_backward_view_4 aten::gelu_backward "
            "triton_poi_fused__unsafe_view_cat_mul_silu_silu_backward_split_view_2",
        ),
        (
            "optimizer",
            "multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>,FusedAdamMathFunctor> "
            "aten::_fused_adamw_ aten::_foreach_add_ aten::linalg_vector_norm",
        ),
        ("other", "triton_poi_fused__to_copy_t_3 triton_per_fused__to_copy_sum_view_2 aten::copy_"),
    ],
)
def test_the_name_of_a_kernel_tells_its_kind(kind, kernels):
    assert {name: kind_of(name) for name in kernels.split()} == dict.fromkeys(kernels.split(), kind)


def test_the_kinds_and_what_a_gpu_waits_for_add_up_to_the_step(tmp_path, capsys):
    kernel_ms = {"nvjet": 5.0, "flash_fwd": 2.0} | {f"triton_copy_{i}": 0.1 for i in range(20)}
    ours = summarize(kernel_ms, 10.0)
    assert ours["kind_ms"]["waiting"] == pytest.approx(1.0)
    assert sum(ours["kind_ms"].values()) == pytest.approx(10.0) and len(ours["kernel_ms"]) == 20
    row = {"variant": "baseline", "torch": "2.13.0", "measured": {"ours": ours}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    print_tables(str(tmp_path / "rows.jsonl"))
    printed = capsys.readouterr().out
    assert "| baseline | 2.13.0 | 10.0 | 2.0 | 5.0 | 0.0 | 0.0 | 0.0 | 0.0 | 2.0 | 1.0 |" in printed
    assert "    5.00  matmul: nvjet\n" in printed


# bench.py prints its row last, train.py writes its log, pytest prints its summary
PYTHON = """echo "$*" >>"$LOG"
case "$1 $*" in
  *--log_dir*) mkdir -p runs/bench_gpu/logs
    echo '{"split": "val", "loss": 3.5}' >runs/bench_gpu/logs/metrics.jsonl ;;
  scripts/bench.py*) echo "number of parameters"; echo '{"unit": "tokens/s"}' ;;
  *pytest*) echo "1 failed, 2 passed"; exit 1 ;;
esac"""
ROW = {"unit": "tokens/s"}


def bench_gpu(folder: Path, env: dict, *args: str) -> subprocess.CompletedProcess:
    """Run a copy of bench_gpu.sh in a folder, whose file "log" the commands write to."""
    (folder / "scripts").mkdir()
    script = folder / "scripts" / "bench_gpu.sh"
    script.write_text((ROOT / "scripts" / "bench_gpu.sh").read_text())
    env = env | {"LOG": str(folder / "log")}
    return subprocess.run(["bash", script, *args], capture_output=True, text=True, env=env)


@pytest.mark.parametrize(
    "args, last, code",
    [
        (["correctness"], [{"ok": False, "summary": "1 failed, 2 passed"}], 1),
        (["small", "--peer", "x", "--data", "y"], [*3 * [ROW], {"split": "val", "loss": 3.5}], 0),
        (["xl", "--micro_batch_size", "2"], 4 * [ROW], 0),
    ],
)
def test_a_call_for_gpus_ends_in_one_line_of_json(tmp_path, args, last, code):
    done = bench_gpu(tmp_path, write_commands(tmp_path, python=PYTHON), *args)
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == last
    started = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    tests = [word for words in started for word in words if word.startswith("tests/")]
    assert all((ROOT / path).exists() for path in tests)
    for value in args[2::2]:  # of a flag
        assert any(value in words for words in started)


# its name, the settings of PyTorch that it finds, its arguments
VARIANT = """echo "${0##*/}" $(env | grep ^TORCH) "$*" >>"$LOG"
case "$*" in
  *print_tables*) echo "a table" ;;
  *4294967296*) exit 1 ;; # out of memory
  scripts/bench.py*) echo '{"unit": "tokens/s"}' ;;
esac"""


def test_each_variant_has_one_change_and_one_that_fails_costs_no_other(tmp_path):
    env = write_commands(tmp_path, python=VARIANT, other=VARIANT)
    done = bench_gpu(tmp_path, env, "variants", "--python", "other")
    assert done.returncode == 1 and done.stderr == "failed: --logits_bytes 4294967296\n"
    *_, table, last = done.stdout.splitlines()
    rows = json.loads(last)
    assert table == "a table" and all(row["unit"] == "tokens/s" for row in rows)
    baseline, *variants = [row["variant"] for row in rows]
    log = (tmp_path / "log").read_text().splitlines()
    started = [line for line in log if "scripts/bench.py" in line and "4294967296" not in line]
    first, *others = [set(line.split()) for line in started]
    assert baseline == "baseline" and len(variants) == 10
    inductor = Path(find_spec("torch").origin).parent / "_inductor" / "config.py"
    for variant, line, words in zip(variants, started[1:], others, strict=True):
        assert words - first == set(variant.split())
        parse(BenchOptions, line.partition("scripts/bench.py ")[2].split())
        if variant.startswith("TORCHINDUCTOR"):
            assert f'"{variant.partition("=")[0]}"' in inductor.read_text()


def test_no_variant_begins_when_the_time_is_over(tmp_path):
    env = write_commands(tmp_path, python=VARIANT) | {"SECONDS": "540"}  # where bash counts on
    done = bench_gpu(tmp_path, env, "variants")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]"
    assert done.stderr.count("left out after 540 s: ") == 11
    assert "scripts/bench.py" not in (tmp_path / "log").read_text()


def test_without_a_gpu_a_call_for_gpus_starts_nothing(tmp_path):
    env = write_commands(tmp_path, python='echo "$*" >>"$LOG"; exit 1')
    assert bench_gpu(tmp_path, env, "small").returncode == 2
    log = (tmp_path / "log").read_text()
    assert "cuda.is_available" in log and "bench.py" not in log
