"""Other libraries' kernels of the same rules, called as their own layers call them.

Owns the calls, each of which imports its library. Knows shapes; must not know how anything is timed.

fla would hand the gated delta rule to FlashQLA where both are installed; `own_kernels_only` keeps its figures
its own. It has to be called before fla is imported.
"""

from __future__ import annotations

import os

from torch import Tensor


def own_kernels_only() -> None:
    """fla runs its Triton kernels, whatever else is installed."""
    os.environ.update(FLA_FLASH_QLA="0", FLA_TILELANG="0")


def fla_delta_step(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token a row, gates and normalisation in the kernel. q, k, v: [B, 1, H, d]; a, b: [B, 1, Hv] before
    the gates; state: [B, Hv, d_v, d_k], read; the new one is a new tensor."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=a,
        beta=b,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        A_log=a_log,
        dt_bias=dt_bias,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
    )


def fla_delta_step_of_transformers(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As transformers calls it: gates outside, state [B, Hv, d_k, d_v]."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=log_decay,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )


def flashinfer_delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    slots: Tensor,
) -> Tensor:
    """One token a row on slots [B] int32 of states [slots, Hv, d_v, d_k], in place; inputs as in
    `fla_delta_step`, dt_bias in fp32."""
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    return gated_delta_rule_decode_pretranspose(
        q, k, v, None, a_log, a, dt_bias, b, initial_state=states, initial_state_indices=slots
    )[0]


def fla_delta_steps(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """T tokens of one row, one by one in one kernel: q, k, v [1, T, H, d] normalised, gates [1, T, Hv]."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    return fused_recurrent_gated_delta_rule(
        q, k, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True, state_v_first=True
    )


def fla_kimi_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """log_decay: [B, 1, H, d_k]; state: [B, H, d_v, d_k], read; the new one is a new tensor."""
    from fla.ops.kda import fused_recurrent_kda

    return fused_recurrent_kda(
        q, k, v, log_decay, beta, initial_state=state, output_final_state=True, state_v_first=True
    )


def fla_convolution_step(x: Tensor, window: Tensor, weight: Tensor) -> Tensor:
    """x: [B, channels]; window: [B, channels, W], moved on in place; weight: [channels, W]. With SiLU."""
    from fla.modules.causal_conv1d.ops import causal_conv1d_update

    return causal_conv1d_update(x, window, weight=weight, activation="silu")[0]


def fla_gated_norm(x: Tensor, gate: Tensor, scale: Tensor) -> Tensor:
    """x, gate: [rows, d_v]; scale: [d_v]."""
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, gate, scale, None)


def fla_delta_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """q, k: [N, T, Hk, d_k] normalised; v: [N, T, Hv, d_v]; log_decay, beta: [N, T, Hv]; state [N, ...]."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        q,
        k,
        v,
        log_decay,
        beta,
        initial_state=state,
        output_final_state=True,
        state_v_first=True,
        cu_seqlens=cu_seqlens,
    )


def flashqla_delta_prefill(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """As `fla_delta_prefill`, of packed sequences [1, T, ...]; q, k and v in bf16, gates in fp32."""
    import flash_qla

    return flash_qla.chunk_gated_delta_rule(
        q,
        k,
        v,
        log_decay,
        beta,
        scale=q.shape[-1] ** -0.5,
        initial_state=state,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        state_v_first=True,
    )


def flashinfer_delta_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    split: str | bool,
) -> tuple[Tensor, Tensor]:
    """Packed sequences without the leading 1: q [T, Hk, d]; alpha the decay itself. split: whether sequences
    are cut over the device, "auto" as it likes."""
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    return chunk_gated_delta_rule(
        q, k, v, alpha, beta, None, state, True, cu_seqlens, use_cp=split, max_seqlen=longest
    )


def fla_kimi_prefill(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `fla_delta_prefill`, with log_decay [N, T, H, d_k]."""
    from fla.ops.kda import chunk_kda

    return chunk_kda(
        q, k, v, log_decay, beta, initial_state=state, output_final_state=True, state_v_first=True
    )


def fla_accumulation_prefill(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Scalar decay: log_decay [N, T, H] a token, or [H] constant (lightning). Scale 1, heads all alike."""
    from fla.ops.simple_gla import chunk_simple_gla

    gates = {"g_gamma": log_decay} if log_decay.dim() == 1 else {"g": log_decay}
    return chunk_simple_gla(
        q, k, v, **gates, scale=1.0, initial_state=state, output_final_state=True, state_v_first=True
    )


def fla_accumulation_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same for one token a row: q, k, v [B, 1, H, d]."""
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    gates = {"g_gamma": log_decay} if log_decay.dim() == 1 else {"g": log_decay}
    return fused_recurrent_simple_gla(
        q, k, v, **gates, scale=1.0, initial_state=state, output_final_state=True, state_v_first=True
    )


def mamba_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    z: Tensor | None,
    slots: Tensor,
) -> Tensor:
    """Mamba1 and Mamba2, on slots: state [slots, (H,) P, N] in place; shapes as the library has them."""
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    return selective_state_update(
        state, x, dt, a, b, c, D=d, z=z, dt_bias=dt_bias, dt_softplus=True, state_batch_indices=slots
    )


def mamba_prefill(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, dt_bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Mamba2: x [N, T, H, P], dt [N, T, H], b and c [N, T, groups, N]; chunks of 256 as Mamba2 has them."""
    from mamba_ssm.ops.triton.ssd_combined import _mamba_chunk_scan_combined_fwd

    out = _mamba_chunk_scan_combined_fwd(
        x, dt, a, b, c, 256, D=d, dt_bias=dt_bias, initial_states=state, dt_softplus=True
    )
    return out[0], out[5]


def mamba_scan_prefill(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, dt_bias: Tensor, z: Tensor
) -> Tensor:
    """Mamba1, the library's CUDA extension: x, dt, z [N, channels, T], b and c [N, 1, states, T], all dense;
    from zeros, since it takes no state."""
    import selective_scan_cuda

    return selective_scan_cuda.fwd(x, dt, a, b, c, d, z, dt_bias, True)[2]


def mamba_gated_norm(x: Tensor, gate: Tensor, scale: Tensor) -> Tensor:
    """Mamba2's: x, gate [rows, inner], the gate first; scale [inner]."""
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn

    return rmsnorm_fn(x, scale, None, z=gate, eps=1e-5, norm_before_gate=False)
