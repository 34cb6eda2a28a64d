#include "layer_attention.h"

#include <algorithm>

#include "mlx/allocator.h"
#include "threads.h"

namespace machd {
namespace {

namespace mx = mlx::core;

// Numbers of keys and values whose attention costs more than having another thread help.
constexpr long kSharedNumbers = 16 * 1024;

}  // namespace

std::optional<Columns> columns_at(const HeldInputs& held, size_t first) {
  if (held.size() <= first) return std::nullopt;
  return Columns{held[first], held[first + 1]};
}

void compute_attention(
    const Queries& queries, const Columns& own, const mx::array& starts, const std::optional<Columns>& prefix, float scale, int window, float* out,
    const Kernels& kernels) {
  const auto& [asking, rows, heads, tokens, head_dim, row_step, head_step, token_step] = queries;
  const long kv_heads = own.keys.shape(1), repeats = heads / kv_heads, value_dim = own.values.shape(3);
  const long at_once = std::min(tokens, tile_tokens(repeats)), tiles = (tokens + at_once - 1) / at_once;
  Attention whole{};
  whole.query_token_step = token_step;
  whole.query_head_step = head_step;
  whole.out_token_step = heads * value_dim;
  whole.out_head_step = value_dim;
  whole.repeats = repeats;
  whole.head_dim = head_dim;
  whole.value_dim = value_dim;
  whole.window = window;
  whole.scale = scale;
  const auto part = [](const Columns& columns, long row, long head) {
    const auto& [keys, values, ring, shift] = columns;
    return KvPart{
        keys.data<float>() + row * keys.strides(0) + head * keys.strides(1),
        values.data<float>() + row * values.strides(0) + head * values.strides(1),
        keys.shape(2), keys.strides(2), values.strides(2), ring, shift};
  };
  const long before = prefix ? prefix->keys.shape(2) : 0;
  const long scratch_bytes = kernels.attend_scratch_bytes(at_once * repeats, whole.head_dim, value_dim);
  const auto work = [&](long begin, long end, int) {
    void* memory = scratch(scratch_bytes);
    for (long task = begin; task < end; ++task) {
      // The last tiles first: they see the most, and threads end together.
      const long tile = tiles - 1 - task / (rows * kv_heads), row = task / kv_heads % rows, head = task % kv_heads;
      Attention a = whole;
      a.queries = asking + row * row_step + head * repeats * head_step;
      a.out = out + (row * tokens * heads + head * repeats) * value_dim;
      if (prefix) a.parts[0] = part(*prefix, 0, head);
      a.parts[1] = part(own, row, head);
      a.before = before + std::max(0, starts.data<int32_t>()[row * starts.strides(0)]);
      kernels.attend(a, tile * at_once, std::min(tokens, (tile + 1) * at_once), memory);
    }
  };
  const long tasks = tiles * rows * kv_heads;
  const long numbers = rows * kv_heads * (before + own.keys.shape(2)) * (whole.head_dim + value_dim) * tiles;
  share(tasks, numbers < kSharedNumbers ? tasks : 1, work);
}

void refuse_other_starts(const mx::array& starts, int rows) {
  refuse(starts.dtype() != mx::int32 || starts.ndim() != 1 || starts.shape(0) != rows, "starts are int32, one for each row");
}

void refuse_other_columns(
    const mx::Shape& asked, const mx::array& keys, const mx::array& values, const mx::array& starts, const std::optional<mx::array>& prefix_keys,
    const std::optional<mx::array>& prefix_values) {
  refuse(prefix_keys.has_value() != prefix_values.has_value(), "a prefix has keys and values");
  const int rows = asked[0], heads = asked[1], head_dim = asked[3], kv_heads = keys.ndim() == 4 ? keys.shape(1) : 0;
  refuse_other_starts(starts, rows);
  refuse(kv_heads == 0 || heads % kv_heads, "heads are a multiple of those of the keys");
  refuse(head_dim == 0 || head_dim % 16 || values.ndim() != 4 || values.shape(3) % 16, "heads have a multiple of 16 numbers");
  const auto go_together = [&](const mx::array& its_keys, const mx::array& its_values, bool is_shared) {
    for (const auto* one : {&its_keys, &its_values})
      refuse(one->dtype() != mx::float32 || one->ndim() != 4, "queries, keys and values are float32 with four axes");
    refuse(its_keys.shape(3) != head_dim || its_values.shape(3) != values.shape(3), "keys are as long as queries");
    refuse(its_keys.shape(1) != kv_heads || its_values.shape(1) != kv_heads, "keys and values have as many heads");
    refuse(its_keys.shape(2) != its_values.shape(2), "keys and values have as many columns");
    refuse(is_shared ? its_keys.shape(0) != 1 || its_values.shape(0) != 1 : its_keys.shape(0) < rows || its_values.shape(0) < rows,
           "keys and values have a place for each row, or one for all");
  };
  go_together(keys, values, false);
  if (prefix_keys) go_together(*prefix_keys, *prefix_values, true);
  refuse(keys.shape(2) == 0 && !prefix_keys && rows > 0 && asked[2] > 0, "there is a column to see");
}

bool takes_over(const mx::array& columns, mx::array& out) {
  const bool is_in_place = columns.is_donatable() && columns.flags().row_contiguous && columns.data_size() == columns.size();
  if (is_in_place) out.copy_shared_buffer(columns);
  else out.set_data(mx::allocator::malloc(out.nbytes()));
  return is_in_place;
}

}  // namespace machd
