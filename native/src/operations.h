// MLX operations that kernels compute.
#pragma once

#include <optional>
#include <string>

#include "mlx/array.h"

namespace machd {

// x times the transposed weights, [.., outputs] in x's dtype, which is float32, float16 or bfloat16; see `Weights`.
//
// mode: "plain" (weights [outputs, inputs], no scales), "affine", "mxfp4", "mxfp8" or "nvfp4", as mlx names them.
// Raises std::invalid_argument where shapes, dtypes or bits do not go together, or no kernel computes them.
mlx::core::array product(
    const mlx::core::array& x,
    const mlx::core::array& weights,
    const std::optional<mlx::core::array>& scales,
    const std::optional<mlx::core::array>& biases,
    const std::string& mode,
    int group,
    int bits);

// Matrices of x [.., rows, inputs] times the transposed weights of experts [experts, outputs, inputs], which `indices` name.
//
// The axes of x before the matrices and those of indices, uint32 or int32, are broadcast to common ones, as mx.gather_qmm does.
// Returns [common axes, rows, outputs] in x's dtype; a row has the bits that `product` gives it with its expert's weights. Where an
// index is not that of an expert, nothing is read and the result is not a number.
// Raises std::invalid_argument as `product`.
mlx::core::array gathered_product(
    const mlx::core::array& x,
    const mlx::core::array& weights,
    const std::optional<mlx::core::array>& scales,
    const std::optional<mlx::core::array>& biases,
    const mlx::core::array& indices,
    const std::string& mode,
    int group,
    int bits);

// Attention of `queries` over the columns that rows have had and those of the pass, which are written; float32 alone.
//
// queries: [rows, heads, tokens, head_dim]. keys, values: [places, kv_heads, columns, head_dim or value_dim], of which the first `rows`
// places are read. starts: int32 [rows], columns before the pass: token t sees those up to starts[row] + t.
// prefix_keys, prefix_values: [1, kv_heads, prefix columns, ..], what rows share and have before their own columns; all of it is seen.
// window: columns that a token sees, its own included; 0 for all.
// Returns [rows, tokens, heads, value_dim].
// Raises std::invalid_argument where shapes or dtypes do not go together.
mlx::core::array attend(
    const mlx::core::array& queries,
    const mlx::core::array& keys,
    const mlx::core::array& values,
    const mlx::core::array& starts,
    const std::optional<mlx::core::array>& prefix_keys,
    const std::optional<mlx::core::array>& prefix_values,
    float scale,
    int window);

// `columns` [places, heads, columns, n] with a pass's `tokens` [rows, heads, tokens, n] in the columns from starts[row] on; what would lie
// behind the last column is left out. In place, where nobody else holds the array. starts: int32 [rows].
// Raises std::invalid_argument where shapes or dtypes do not go together.
mlx::core::array written(const mlx::core::array& columns, const mlx::core::array& tokens, const mlx::core::array& starts);

// Turns the first `rotated` heads of x [rows, tokens, heads, head_dim] by their positions, and copies the others; float32 alone.
//
// cosines, sines: [positions, head_dim / 2]. positions: int32 [rows], of each row's first token; one beyond the table is taken as its last.
// Raises std::invalid_argument where shapes or dtypes do not go together.
mlx::core::array rotate(
    const mlx::core::array& x,
    const mlx::core::array& cosines,
    const mlx::core::array& sines,
    const mlx::core::array& positions,
    int rotated);

// x / sqrt(mean of squares + eps) * weight over the last axis, as mx.fast.rms_norm; float32 alone.
// Raises std::invalid_argument where shapes or dtypes do not go together.
mlx::core::array rms_norm(const mlx::core::array& x, const mlx::core::array& weight, float eps);

// (x - mean) / sqrt(variance + eps) * weight + bias over the last axis, as mx.fast.layer_norm; float32 alone.
// Raises std::invalid_argument where shapes or dtypes do not go together.
mlx::core::array layer_norm(const mlx::core::array& x, const mlx::core::array& weight, const mlx::core::array& bias, float eps);

// x times the probability that a normal variable lies below x, as mlx.nn.gelu; float32 alone.
// Raises std::invalid_argument for another dtype.
mlx::core::array gelu(const mlx::core::array& x);

// gate * sigmoid(gate) * up, where x [.., 2 n] holds gate and up; float32 alone.
// Raises std::invalid_argument where x has no such last axis.
mlx::core::array silu_product(const mlx::core::array& x);

// The instruction set whose kernels serve: "avx512", "avx2" or "neon"; empty where none does.
std::string instruction_set();

// Has an instruction set's kernels serve from now on; what was built before, and not yet computed, keeps its own.
// Raises std::invalid_argument if this processor has none of that name.
void use_instruction_set(const std::string& name);

}  // namespace machd
