// A layer's weights as arrays of MLX.
#pragma once

#include <optional>
#include <string>

#include "held_inputs.h"
#include "mlx/array.h"
#include "weights.h"

namespace machd {

constexpr const char* kOtherSizes = "this graph was compiled for other sizes";

// What arrays hold, without their addresses; of weights with three axes, what one expert has.
// Raises std::invalid_argument where shapes, dtypes or bits do not go together.
Weights described(
    const mlx::core::array& weights,
    int axes,
    const std::optional<mlx::core::array>& scales,
    const std::optional<mlx::core::array>& biases,
    const std::string& mode,
    int group,
    int bits);

// Takes the addresses of an operation's inputs from the first one of the weights on: weights, scales, biases, as far as there are any.
void set_addresses(Weights& weights, const HeldInputs& held, size_t first);

}  // namespace machd
