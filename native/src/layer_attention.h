// Attention of a pass over arrays of columns, on all threads.
#pragma once

#include <optional>

#include "held_inputs.h"

namespace machd {

// Queries of a pass: float32, a head's numbers one after another.
struct Queries {
  const float* data;
  long rows, heads, tokens, head_dim;
  long row_step, head_step, token_step;
};

// Keys and values [places, kv_heads, columns, n], a column's numbers one after another; `ring` and `shift` as of KvPart.
struct Columns {
  const mlx::core::array &keys, &values;
  long ring = 0, shift = 0;
};

// Those from an input on; none where there are not so many.
std::optional<Columns> columns_at(const HeldInputs& held, size_t first);

// Computes `attend` of operations.h to out [rows, tokens, heads, value_dim].
void compute_attention(
    const Queries& queries,
    const Columns& own,
    const mlx::core::array& starts,
    const std::optional<Columns>& prefix,
    float scale,
    int window,
    float* out,
    const Kernels& kernels);

// Raises std::invalid_argument where queries of this shape, [rows, heads, tokens, head_dim], cannot attend to columns.
void refuse_other_columns(
    const mlx::core::Shape& queries,
    const mlx::core::array& keys,
    const mlx::core::array& values,
    const mlx::core::array& starts,
    const std::optional<mlx::core::array>& prefix_keys,
    const std::optional<mlx::core::array>& prefix_values);

// Raises std::invalid_argument unless there is one int32 for each row.
void refuse_other_starts(const mlx::core::array& starts, int rows);

// Gives `out` the memory of `columns` where nobody else holds these, and otherwise some of its own, which their numbers are still to
// be copied to; returns which.
bool takes_over(const mlx::core::array& columns, mlx::core::array& out);

}  // namespace machd
