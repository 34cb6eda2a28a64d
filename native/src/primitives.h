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

// The instruction set whose kernels serve: "avx512", "avx2" or "neon"; empty where none does.
std::string instruction_set();

// Has an instruction set's kernels serve from now on; what was built before, and not yet computed, keeps its own.
// Raises std::invalid_argument if this processor has none of that name.
void use_instruction_set(const std::string& name);

}  // namespace machd
