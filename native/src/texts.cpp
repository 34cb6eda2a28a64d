#include "texts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bert_layers.h"
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

// Tiles of queries that a thread takes at once at the most, and how often it comes for more at the least.
constexpr long kMostTiles = 8;
constexpr long kTurns = 16;

class TextMeansPrimitive : public mx::UnaryPrimitive {
 public:
  TextMeansPrimitive(mx::Stream stream, Texts texts, const Kernels* kernels)
      : UnaryPrimitive(stream), texts_(std::move(texts)), kernels_(kernels) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    if (out.size() == 0) return;
    mx::cpu::get_command_encoder(stream()).dispatch(
        [held = HeldInputs(inputs, stream()), to = mx::array::unsafe_weak_copy(out), texts = texts_, kernels = kernels_]() mutable {
          held.gather();
          const long size = to.shape(1);
          share(long(texts.size()), 1, [&](long begin, long end, int) {
            for (long at = begin; at < end; ++at)
              kernels->mean_of_rows(held[0].data<float>() + texts[at].begin * size, texts[at].length, size, to.data<float>() + at * size);
          });
        });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return "MachdTextMeans"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }  // one for each pass

 private:
  Texts texts_;
  const Kernels* kernels_;
};

}  // namespace

Texts texts_of(const std::vector<int>& lengths, long rows) {
  Texts texts;
  long begin = 0;
  for (const long length : lengths) {
    refuse(length <= 0, "a text has tokens");
    texts.push_back({begin, length});
    begin += length;
  }
  refuse(begin != rows, "texts have as many tokens as there are rows");
  return texts;
}

void attend_within(const Texts& texts, const ProjectedRows& rows, float* out, const Kernels& kernels) {
  struct Tile {
    Text text;
    long begin, end;  // queries
  };
  const long hidden = rows.hidden, head_dim = hidden / rows.heads, most = tile_tokens(1);
  std::vector<Tile> tiles;
  for (const Text& text : texts) {
    const long count = (text.length + most - 1) / most, at_once = (text.length + count - 1) / count;
    for (long begin = 0; begin < text.length; begin += at_once) tiles.push_back({text, begin, std::min(text.length, begin + at_once)});
  }
  // The longest ones first, so that threads end together.
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.text.length > b.text.length; });
  Attention whole{};
  whole.query_token_step = 3 * hidden;
  whole.out_token_step = hidden;
  whole.repeats = 1;
  whole.head_dim = whole.value_dim = head_dim;
  whole.scale = 1 / std::sqrt(float(head_dim));
  const long scratch_bytes = kernels.attend_scratch_bytes(most, head_dim, head_dim);
  const long tasks = long(tiles.size()) * rows.heads;
  share(tasks, std::clamp<long>(tasks / (kTurns * thread_count()), 1, kMostTiles), [&](long first, long last, int) {
    void* memory = scratch(scratch_bytes);
    for (long task = first; task < last; ++task) {
      const Tile& tile = tiles[task / rows.heads];
      const long head = task % rows.heads;
      const float* from = rows.data + tile.text.begin * 3 * hidden + head * head_dim;
      Attention a = whole;
      a.queries = from;
      a.out = out + tile.text.begin * hidden + head * head_dim;
      a.parts[1] = {from + hidden, from + 2 * hidden, tile.text.length, 3 * hidden, 3 * hidden};
      a.before = tile.text.length;  // every token sees all
      kernels.attend(a, tile.begin, tile.end, memory);
    }
  });
}

mx::array text_means(const mx::array& rows, const std::vector<int>& lengths) {
  const Kernels* kernels = present_kernels();
  refuse(rows.dtype() != mx::float32 || rows.ndim() != 2, "rows are float32 with two axes");
  Texts texts = texts_of(lengths, rows.shape(0));
  const mx::Shape shape{int(texts.size()), rows.shape(1)};
  return mx::array(shape, mx::float32, std::make_shared<TextMeansPrimitive>(mx::default_stream(mx::Device::cpu), std::move(texts), kernels), {rows});
}

}  // namespace machd
