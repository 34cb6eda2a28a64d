#include <algorithm>
#include <cstring>

#include "held_inputs.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "operations.h"
#include "threads.h"

namespace machd {
namespace {

namespace mx = mlx::core;

// Numbers of keys and values whose attention costs more than having another thread help.
constexpr long kSharedNumbers = 16 * 1024;

class AttendPrimitive : public mx::UnaryPrimitive {
 public:
  AttendPrimitive(mx::Stream stream, float scale, int window, const Kernels* kernels)
      : UnaryPrimitive(stream), scale_(scale), window_(window), kernels_(kernels) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    if (out.size() == 0) return;
    mx::cpu::get_command_encoder(stream()).dispatch(
        [held = HeldInputs(inputs, stream(), HeldInputs::Need::kLastAxis), to = mx::array::unsafe_weak_copy(out), this_scale = scale_,
         window = window_, kernels = kernels_]() mutable {
          held.gather();
          run(held, to, this_scale, window, *kernels);
        });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return "MachdAttend"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& another = static_cast<const AttendPrimitive&>(other);
    return another.scale_ == scale_ && another.window_ == window_ && another.kernels_ == kernels_;
  }

 private:
  static void run(const HeldInputs& held, mx::array& out, float scale, int window, const Kernels& kernels) {
    const mx::array &queries = held[0], &keys = held[1], &values = held[2], &starts = held[3];
    const long rows = queries.shape(0), heads = queries.shape(1), tokens = queries.shape(2);
    const long kv_heads = keys.shape(1), repeats = heads / kv_heads, value_dim = values.shape(3);
    const long at_once = std::min(tokens, tile_tokens(repeats)), tiles = (tokens + at_once - 1) / at_once;
    Attention whole{};
    whole.query_token_step = queries.strides(2);
    whole.query_head_step = queries.strides(1);
    whole.out_token_step = heads * value_dim;
    whole.out_head_step = value_dim;
    whole.repeats = repeats;
    whole.head_dim = queries.shape(3);
    whole.value_dim = value_dim;
    whole.window = window;
    whole.scale = scale;
    const auto part = [](const mx::array& its_keys, const mx::array& its_values, long row, long head) {
      return KvPart{
          its_keys.data<float>() + row * its_keys.strides(0) + head * its_keys.strides(1),
          its_values.data<float>() + row * its_values.strides(0) + head * its_values.strides(1),
          its_keys.shape(2), its_keys.strides(2), its_values.strides(2)};
    };
    const bool has_prefix = held.size() > 4;
    const long prefix = has_prefix ? held[4].shape(2) : 0;
    const long scratch_bytes = kernels.attend_scratch_bytes(at_once * repeats, whole.head_dim, value_dim);
    const auto work = [&](long begin, long end, int) {
      void* memory = scratch(scratch_bytes);
      for (long task = begin; task < end; ++task) {
        // The last tiles first: they see the most, and threads end together.
        const long tile = tiles - 1 - task / (rows * kv_heads), row = task / kv_heads % rows, head = task % kv_heads;
        Attention a = whole;
        a.queries = queries.data<float>() + row * queries.strides(0) + head * repeats * queries.strides(1);
        a.out = out.data<float>() + (row * tokens * heads + head * repeats) * value_dim;
        if (has_prefix) a.parts[0] = part(held[4], held[5], 0, head);
        a.parts[1] = part(keys, values, row, head);
        a.before = prefix + std::max(0, starts.data<int32_t>()[row * starts.strides(0)]);
        kernels.attend(a, tile * at_once, std::min(tokens, (tile + 1) * at_once), memory);
      }
    };
    const long tasks = tiles * rows * kv_heads;
    const long numbers = rows * kv_heads * (prefix + keys.shape(2)) * (whole.head_dim + value_dim) * tiles;
    share(tasks, numbers < kSharedNumbers ? tasks : 1, work);
  }

  float scale_;
  int window_;
  const Kernels* kernels_;
};

class WritePrimitive : public mx::UnaryPrimitive {
 public:
  using UnaryPrimitive::UnaryPrimitive;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    const mx::array& columns = inputs[0];
    const bool is_in_place = columns.is_donatable() && columns.flags().row_contiguous && columns.data_size() == columns.size();
    if (is_in_place) out.copy_shared_buffer(columns);
    else out.set_data(mx::allocator::malloc(out.nbytes()));
    if (out.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    // What is written in place needs nothing brought together.
    std::vector<mx::array> sources = {inputs[1], inputs[2]};
    if (!is_in_place) sources.push_back(columns);
    encoder.dispatch([held = HeldInputs(sources, stream()), to = mx::array::unsafe_weak_copy(out)]() mutable {
      held.gather();
      if (held.size() > 2) std::memcpy(to.data<char>(), held[2].data<char>(), to.nbytes());
      const mx::array &tokens = held[0], &starts = held[1];
      const long rows = tokens.shape(0), heads = tokens.shape(1), count = tokens.shape(2), all = to.shape(2);
      const long bytes = to.shape(3) * long(to.itemsize());
      for (long row = 0; row < rows; ++row) {
        const long begin = std::clamp<long>(starts.data<int32_t>()[row], 0, all), fits = std::min(count, all - begin);
        for (long head = 0; head < heads; ++head)
          std::memcpy(
              to.data<char>() + ((row * heads + head) * all + begin) * bytes, tokens.data<char>() + (row * heads + head) * count * bytes,
              fits * bytes);
      }
    });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return "MachdWritten"; }
  bool is_equivalent(const mx::Primitive&) const override { return true; }
};

void refuse_other_starts(const mx::array& starts, int rows) {
  refuse(starts.dtype() != mx::int32 || starts.ndim() != 1 || starts.shape(0) != rows, "starts are int32, one for each row");
}

}  // namespace

mx::array attend(
    const mx::array& queries,
    const mx::array& keys,
    const mx::array& values,
    const mx::array& starts,
    const std::optional<mx::array>& prefix_keys,
    const std::optional<mx::array>& prefix_values,
    float scale,
    int window) {
  const Kernels* kernels = chosen_kernels();
  refuse(kernels == nullptr, "no kernel computes this here");
  refuse(prefix_keys.has_value() != prefix_values.has_value(), "a prefix has keys and values");
  std::vector<mx::array> inputs = {queries, keys, values, starts};
  if (prefix_keys) inputs.insert(inputs.end(), {*prefix_keys, *prefix_values});
  for (const auto& one : inputs) {
    const bool is_starts = &one == &inputs[3];
    refuse(!is_starts && (one.dtype() != mx::float32 || one.ndim() != 4), "queries, keys and values are float32 with four axes");
  }
  const int rows = queries.shape(0), heads = queries.shape(1), kv_heads = keys.shape(1);
  refuse_other_starts(starts, rows);
  refuse(kv_heads == 0 || heads % kv_heads || window < 0, "heads are a multiple of those of the keys");
  refuse(queries.shape(3) == 0 || queries.shape(3) % 16 || values.shape(3) % 16, "heads have a multiple of 16 numbers");
  const auto go_together = [&](const mx::array& its_keys, const mx::array& its_values, bool is_shared) {
    refuse(its_keys.shape(3) != queries.shape(3) || its_values.shape(3) != values.shape(3), "keys are as long as queries");
    refuse(its_keys.shape(1) != kv_heads || its_values.shape(1) != kv_heads, "keys and values have as many heads");
    refuse(its_keys.shape(2) != its_values.shape(2), "keys and values have as many columns");
    refuse(is_shared ? its_keys.shape(0) != 1 || its_values.shape(0) != 1 : its_keys.shape(0) < rows || its_values.shape(0) < rows,
           "keys and values have a place for each row, or one for all");
  };
  go_together(keys, values, false);
  if (prefix_keys) go_together(*prefix_keys, *prefix_values, true);
  refuse((keys.shape(2) == 0 && !prefix_keys) && queries.size() > 0, "there is a column to see");
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  return mx::array(
      mx::Shape{rows, queries.shape(2), heads, values.shape(3)}, mx::float32,
      std::make_shared<AttendPrimitive>(stream, scale, window, kernels), inputs);
}

mx::array written(const mx::array& columns, const mx::array& tokens, const mx::array& starts) {
  refuse(columns.ndim() != 4 || tokens.ndim() != 4 || columns.dtype() != tokens.dtype(), "columns and tokens have four axes and one dtype");
  refuse(tokens.shape(0) > columns.shape(0) || tokens.shape(1) != columns.shape(1) || tokens.shape(3) != columns.shape(3),
         "tokens are like columns");
  refuse_other_starts(starts, tokens.shape(0));
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  return mx::array(columns.shape(), columns.dtype(), std::make_shared<WritePrimitive>(stream), {columns, tokens, starts});
}

}  // namespace machd
