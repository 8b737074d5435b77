"""Portable kernels: the grouped matrix product of both projections, and the quantisation of rows to int8 or e4m3."""
# mypy: ignore-errors
# (device code is Triton's language, not Python's)

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.device.activations import activate, activate_gated
from moeq_kernels.device.codecs import codes, column_of, in_marlin_order
from moeq_kernels.device.numerics import dot, e4m3_to_float, float_to_e4m3, round_half_even, round_to
from moeq_kernels.device.scales import group_scales, scale_offset, scale_to_float, single_order, weight_tile


@triton.jit
def _finish(acc, rows, valid, p0, expert, scale, bias, global_scale, x_scale, pair_weight,
            N: tl.constexpr, CODEC: tl.constexpr, ORDER: tl.constexpr, STRIDE: tl.constexpr, SCALE: tl.constexpr,
            BIAS_SINGLE: tl.constexpr, CHANNELWISE: tl.constexpr, GLOBALS: tl.constexpr, GLOBAL_UNIT: tl.constexpr,
            BN: tl.constexpr, WEIGHT_FIRST: tl.constexpr):
    """Apply everything linear to float32 sums: scales of channels, activations and the matrix, router weight, bias.

    An expert has GLOBALS global scales, of equal shares of the columns, in units of GLOBAL_UNIT. WEIGHT_FIRST
    multiplies by the router weight before the bias (router weight on input).
    """
    positions = p0 + tl.arange(0, BN)
    inside = positions < N
    acc = acc.to(tl.float32)
    if CHANNELWISE:
        offset = scale_offset(0, positions, CODEC, ORDER, STRIDE)
        acc = acc * scale_to_float(tl.load(scale + offset, mask=inside, other=0), SCALE)[None, :]
    if x_scale is not None:
        acc = acc * tl.load(x_scale + rows, mask=valid, other=0.0)[:, None]
    if global_scale is not None:
        if GLOBALS == 1:
            acc = acc * (tl.load(global_scale + expert) * GLOBAL_UNIT)
        else:
            share = column_of(positions, CODEC) // (N // GLOBALS)
            factors = tl.load(global_scale + expert * GLOBALS + share, mask=inside, other=0.0)
            acc = acc * (factors * GLOBAL_UNIT)[None, :]
    if WEIGHT_FIRST:
        acc = acc * pair_weight[:, None]
    if bias is not None:
        column = column_of(positions, CODEC)
        if BIAS_SINGLE:
            column = single_order(column)
        acc = acc + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _fp8_step(a, w, scale, x_scale, rows, valid, k0, p0, K: tl.constexpr, N: tl.constexpr, G: tl.constexpr,
              GROUP: tl.constexpr, CODEC: tl.constexpr, ORDER: tl.constexpr, STRIDE: tl.constexpr, SCALE: tl.constexpr,
              CHANNELWISE: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, FP8: tl.constexpr,
              INTERPRET: tl.constexpr):
    """Multiply BK columns of e4m3 codes into float32 [BM, BN], and apply both scales if weights have groups.

    Hopper's tensor cores keep 14 bits of a sum of e4m3 products, so sums of BK columns are added up in float32.
    """
    b = codes(w, None, k0, p0, K, N, BK, BN, CODEC).to(tl.uint8)
    if FP8 == "native":
        value = tl.dot(a, b.to(tl.float8e4nv, bitcast=True))
    else:
        zeros = tl.zeros((a.shape[0], BN), tl.float32)
        value = dot(a, round_to(e4m3_to_float(b), a.dtype, INTERPRET), zeros, INTERPRET)
    if not CHANNELWISE:  # the BK columns lie in one group
        groups = k0 // GROUP + tl.arange(0, 1)
        value = value * group_scales(scale, groups, p0, G, N, CODEC, ORDER, STRIDE, SCALE, BN)
        value = value * tl.load(x_scale + rows.to(tl.int64) * G + k0 // GROUP, mask=valid, other=0.0)[:, None]
    return value


@triton.jit
def moe_gemm(
    x, x_scale, w, high, scale, zero, bias, global_scale, permutation, group_index, out,
    tiles, pair_of_row, pair_weights, stride_x, stride_out,
    stride_we, stride_he, stride_se, stride_ze, stride_be,
    TOP_K: tl.constexpr, K_X: tl.constexpr, N_OUT: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    CODEC: tl.constexpr, ELEMENT: tl.constexpr, ORDER: tl.constexpr, STRIDE: tl.constexpr, SCALE: tl.constexpr,
    CHANNELWISE: tl.constexpr, GLOBALS: tl.constexpr, GLOBAL_UNIT: tl.constexpr, FP8: tl.constexpr,
    BIAS_SINGLE: tl.constexpr, EPILOGUE: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, WEIGHT_FIRST: tl.constexpr, WEIGHT_LAST: tl.constexpr,
    TILES_N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
    INTERPRET: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Compute one BM x BN tile of one expert's product from packed weights, with its epilogue.

    `tiles` `[T, 8]` are those of `device.routing` with height BM. For each sorted row, row `pair_of_row[row] // TOP_K`
    of x is read (the row itself if TOP_K is 0) and the row of out is written. EPILOGUE is `halves` (two accumulators of
    BN columns, gate from p0 and up from p0 + N / 2), `interleaved` (one accumulator, pairs of columns) or `plain`.
    WEIGHT_FIRST and WEIGHT_LAST say whether and when the router weight of a row's pair is applied. FP8 is empty, or
    how x holds e4m3 codes: `native` (tensor cores multiply them) or `decoded` (as bfloat16 numbers, which hold them
    exactly); x_scale holds their scales `[R]`, or `[R, G]` if weights have groups.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    tile = tiles + program // TILES_N * 8
    p0 = (program % TILES_N) * BN
    expert = tl.load(tile)
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    sorted_rows = tl.load(tile + 1) + tl.arange(0, BM)
    valid = sorted_rows < tl.load(tile + 2)
    rows = sorted_rows
    if TOP_K > 0 or WEIGHT_FIRST or WEIGHT_LAST:
        pairs = tl.load(pair_of_row + sorted_rows, mask=valid, other=0)
    if TOP_K > 0:
        rows = pairs // TOP_K
    w += expert * stride_we
    if high is not None:
        high += expert * stride_he
    if scale is not None:
        scale += expert * stride_se
    if zero is not None:
        zero += expert * stride_ze
    if bias is not None:
        bias += expert * stride_be
    if permutation is not None:
        permutation += expert * K
    if group_index is not None:
        group_index += expert * K

    ACC: tl.constexpr = tl.int32 if ELEMENT == "int8" else tl.float32
    acc = tl.zeros((BM, BN), ACC)
    if EPILOGUE == "halves":
        acc_up = tl.zeros((BM, BN), ACC)
    x_rows = x + rows.to(tl.int64)[:, None] * stride_x
    for step in range((K + BK - 1) // BK):
        k0 = step * BK
        k = k0 + tl.arange(0, BK)
        source = k
        if permutation is not None:
            source = tl.load(permutation + k, mask=k < K, other=K_X)
        inside = valid[:, None] & ((source >= 0) & (source < K_X))[None, :]
        a = tl.load(x_rows + source[None, :], mask=inside, other=0.0 if FP8 == "native" else 0)
        if FP8 == "":
            b = weight_tile(w, high, scale, zero, group_index, k0, p0, K, N, G, GROUP, ROWS, CODEC, ELEMENT, ORDER,
                            STRIDE, SCALE, CHANNELWISE, BK, BN, DTYPE, INTERPRET)
            acc = dot(a, b, acc, INTERPRET)
            if EPILOGUE == "halves":
                b = weight_tile(w, high, scale, zero, group_index, k0, p0 + N // 2, K, N, G, GROUP, ROWS, CODEC,
                                ELEMENT, ORDER, STRIDE, SCALE, CHANNELWISE, BK, BN, DTYPE, INTERPRET)
                acc_up = dot(a, b, acc_up, INTERPRET)
        else:
            acc += _fp8_step(a, w, scale, x_scale, rows, valid, k0, p0, K, N, G, GROUP, CODEC, ORDER, STRIDE, SCALE,
                             CHANNELWISE, BK, BN, FP8, INTERPRET)
            if EPILOGUE == "halves":
                acc_up += _fp8_step(a, w, scale, x_scale, rows, valid, k0, p0 + N // 2, K, N, G, GROUP, CODEC, ORDER,
                                    STRIDE, SCALE, CHANNELWISE, BK, BN, FP8, INTERPRET)

    if FP8 != "" and not CHANNELWISE:
        x_scale = None  # scales of groups are in the sums already
    pair_weight = tl.full((BM,), 1.0, tl.float32)
    if WEIGHT_FIRST or WEIGHT_LAST:
        pair_weight = tl.load(pair_weights + pairs, mask=valid, other=0.0)
    value = _finish(acc, rows, valid, p0, expert, scale, bias, global_scale, x_scale, pair_weight, N,
                    CODEC, ORDER, STRIDE, SCALE, BIAS_SINGLE, CHANNELWISE and scale is not None, GLOBALS, GLOBAL_UNIT,
                    BN, WEIGHT_FIRST)
    column = column_of(p0 + tl.arange(0, BN), CODEC)
    if EPILOGUE == "halves":
        up = _finish(acc_up, rows, valid, p0 + N // 2, expert, scale, bias, global_scale, x_scale,
                     pair_weight, N, CODEC, ORDER, STRIDE, SCALE, BIAS_SINGLE, CHANNELWISE and scale is not None,
                     GLOBALS, GLOBAL_UNIT, BN, WEIGHT_FIRST)
        value = activate_gated(value, up, ACTIVATION, ALPHA, BETA, LIMIT)
        keep = column < N // 2
    elif EPILOGUE == "interleaved":
        # A position in Marlin's order is 8 octet + ...; gate and up differ in the octet's lowest bit.
        if in_marlin_order(CODEC):
            pairs_last = tl.permute(tl.reshape(value, (BM, BN // 16, 2, 8)), (0, 1, 3, 2))
            column = tl.reshape(tl.permute(tl.reshape(column, (BN // 16, 2, 8)), (0, 2, 1)), (BN // 2, 2))
        else:
            pairs_last = tl.reshape(value, (BM, BN // 16, 8, 2))
            column = tl.reshape(column, (BN // 2, 2))
        gate, up = tl.split(pairs_last)
        value = tl.reshape(activate_gated(gate, up, ACTIVATION, ALPHA, BETA, LIMIT), (BM, BN // 2))
        column, _odd = tl.split(column)
        column = column // 2
        keep = column < N // 2
    else:
        if ACTIVATION != "none":
            value = activate(value, ACTIVATION)
        keep = column < N
    if WEIGHT_LAST:
        value = value * pair_weight[:, None]
    keep = keep & (column < N_OUT)
    where = out + sorted_rows.to(tl.int64)[:, None] * stride_out + column[None, :]
    tl.store(where, round_to(value, out.dtype.element_ty, INTERPRET), mask=valid[:, None] & keep[None, :])


@triton.jit
def quantize_rows(x, q, scales, static_scale, stride_x, stride_q,
                  K: tl.constexpr, BLOCK: tl.constexpr, INTERPRET: tl.constexpr, DEPENDENT: tl.constexpr):
    """Quantise a row to symmetric int8 codes, to nearest even; scale = max |x| / 127 (1 for zeros) or static_scale."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    if static_scale is not None:
        scale = tl.load(static_scale)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, K, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(x + row * stride_x + column, mask=column < K, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        top = tl.max(largest, axis=0)
        scale = tl.where(top > 0.0, tl.div_rn(top, 127.0), 1.0)
    for start in range(0, K, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride_x + column, mask=column < K, other=0.0).to(tl.float32)
        code = round_half_even(tl.div_rn(value, scale))
        code = tl.minimum(tl.maximum(code, -128.0), 127.0)
        tl.store(q + row * stride_q + column, code.to(tl.int8), mask=column < K)
    tl.store(scales + row, scale)


@triton.jit
def quantize_rows_e4m3(x, q, scales, static_scale, stride_x, stride_q, K: tl.constexpr, G: tl.constexpr,
                       GROUP: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
                       INTERPRET: tl.constexpr):
    """Quantise a group of GROUP columns of a row to e4m3 codes, to nearest even, with scales `[R, G]`.

    q holds bytes, or the codes as bfloat16 numbers. scale = max |x| / 448 (1 for zeros) or static_scale. vLLM 0.33
    quantises per token and per group likewise, but keeps scales above 1 / (448 * 512) and 1e-10 / 448.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    first = group * GROUP
    if static_scale is not None:
        scale = tl.load(static_scale)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, GROUP, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = (column < GROUP) & (first + column < K)
            value = tl.load(x + row * stride_x + first + column, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        top = tl.max(largest, axis=0)
        scale = tl.where(top > 0.0, tl.div_rn(top, 448.0), 1.0)
    for start in range(0, GROUP, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (column < GROUP) & (first + column < K)
        value = tl.load(x + row * stride_x + first + column, mask=inside, other=0.0).to(tl.float32)
        code = float_to_e4m3(tl.div_rn(value, scale))
        if q.dtype.element_ty == tl.bfloat16:
            code = round_to(e4m3_to_float(code), tl.bfloat16, INTERPRET)
        tl.store(q + row * stride_q + first + column, code, mask=inside)
    tl.store(scales + row * G + group, scale)
