#include "bert_layers.h"

#include <algorithm>
#include <utility>

#include "held_inputs.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "operations.h"
#include "texts.h"
#include "threads.h"

namespace machd {
namespace {

namespace mx = mlx::core;

// Rows up to which all threads work on the same ones, each with some of the weights. Beyond, each thread takes blocks of rows, whose
// numbers stay in its second cache from one product to the next.
constexpr long kCommonRows = 96;
constexpr long kBlockRows = 96;

// Rows of a block are a multiple of so many, as a product's tiles have them.
constexpr long kRowsTogether = 12;

// Rows that a thread normalises in about the time that another takes to join it, and panels that it takes at once.
constexpr long kNormRows = 32;
constexpr long kStretchPanels = 2;

long block_rows(long rows) {
  if (rows <= kCommonRows) return rows;
  const long threads = thread_count(), in_turn = threads * kBlockRows;
  const long blocks = (rows + in_turn - 1) / in_turn * threads;  // each thread has as many
  return ((rows + blocks - 1) / blocks + kRowsTogether - 1) / kRowsTogether * kRowsTogether;
}

// Calls work(begin, end, thread) for all of `count`: on all threads, or on this one.
struct Runner {
  bool is_common;

  template <class Work>
  void operator()(long count, long stretch, Work work) const {
    if (is_common) share(count, stretch, work);
    else work(0, count, 0);
  }
};

// A pass over rows of texts, whose hidden states are the result's memory.
struct Pass {
  const BertLayers::Stack& stack;
  const Texts& texts;
  const Kernels& kernels;
  float* hidden;     // [rows, hidden]
  float* projected;  // [rows, 3 hidden]
  float* mixed;      // [rows, hidden]
  long rows, block;

  // What a block of rows has in `memory` between its products.
  long block_numbers() const {
    long gates = 0;
    for (const auto& one : stack.blocks) gates = std::max(gates, one.up.panels().outputs);
    return block * (stack.hidden() + gates);
  }

  void compute(const float* x) {
    by_block([&](long begin, long count, float*, Runner run) {
      const long size = stack.hidden();
      run(count, kNormRows, [&](long from, long to, int) {
        norm(stack.embedding_norm, x + begin * size, hidden + begin * size, from, to);
      });
      project(stack.blocks[0], begin, count, run);
    });
    for (size_t layer = 0; layer < stack.blocks.size(); ++layer) {
      attend_within(texts, {projected, stack.hidden(), stack.heads}, mixed, kernels);
      by_block([&](long begin, long count, float* memory, Runner run) {
        feed_forward(stack.blocks[layer], begin, count, memory, run);
        if (layer + 1 < stack.blocks.size()) project(stack.blocks[layer + 1], begin, count, run);
      });
    }
  }

 private:
  template <class Work>
  void by_block(Work work) {
    const long bytes = long(sizeof(float)) * block_numbers();
    if (block == rows) {
      work(0, rows, static_cast<float*>(scratch(bytes)), Runner{true});
      return;
    }
    share((rows + block - 1) / block, 1, [&](long begin, long end, int) {
      float* memory = static_cast<float*>(scratch(bytes));
      for (long at = begin * block; at < std::min(rows, end * block); at += block) work(at, std::min(block, rows - at), memory, Runner{false});
    });
  }

  void norm(const NormWeights& weights, const float* x, float* out, long begin, long end) const {
    kernels.layer_norm(x, weights.weight(), weights.bias(), weights.eps(), weights.size(), out, begin, end);
  }

  void multiply(const PanelProduct& product, Runner run) const {
    run(product.panels.count(), kStretchPanels, [&](long begin, long end, int) { kernels.multiply_panels(product, begin, end); });
  }

  void project(const BertBlock& layer, long begin, long count, Runner run) const {
    const Panels& qkv = layer.qkv.panels();
    multiply({hidden + begin * stack.hidden(), count, qkv, false, nullptr, projected + begin * qkv.outputs}, run);
  }

  void feed_forward(const BertBlock& layer, long begin, long count, float* memory, Runner run) const {
    float *const rows_here = hidden + begin * stack.hidden(), *const attended = memory, *const gated = memory + count * stack.hidden();
    multiply({mixed + begin * stack.hidden(), count, layer.output.panels(), false, rows_here, attended}, run);
    run(count, kNormRows, [&](long from, long to, int) { norm(layer.attention_norm, attended, attended, from, to); });
    multiply({attended, count, layer.up.panels(), true, nullptr, gated}, run);
    multiply({gated, count, layer.down.panels(), false, attended, rows_here}, run);
    run(count, kNormRows, [&](long from, long to, int) { norm(layer.output_norm, rows_here, rows_here, from, to); });
  }
};

class BertPrimitive : public mx::UnaryPrimitive {
 public:
  BertPrimitive(mx::Stream stream, std::shared_ptr<const BertLayers::Stack> stack, Texts texts, const Kernels* kernels)
      : UnaryPrimitive(stream), stack_(std::move(stack)), texts_(std::move(texts)), kernels_(kernels) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    if (out.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const long rows = out.shape(0), hidden = stack_->hidden();
    mx::array memory({int(rows), int(4 * hidden)}, mx::float32, nullptr, {});
    memory.set_data(mx::allocator::malloc(memory.nbytes()));
    encoder.dispatch([held = HeldInputs(inputs, stream()), memory = mx::array::unsafe_weak_copy(memory), to = mx::array::unsafe_weak_copy(out),
                      stack = stack_, texts = texts_, kernels = kernels_, rows, hidden]() mutable {
      held.gather();
      float* const projected = memory.data<float>();
      Pass{*stack, texts, *kernels, to.data<float>(), projected, projected + 3 * rows * hidden, rows, block_rows(rows)}.compute(held[0].data<float>());
    });
    encoder.add_temporary(std::move(memory));
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return "MachdBertLayers"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }  // one for each pass

 private:
  std::shared_ptr<const BertLayers::Stack> stack_;
  Texts texts_;
  const Kernels* kernels_;  // those of when the graph was built
};

}  // namespace

PanelWeights::PanelWeights(const mx::array& weights, const mx::array& bias) : kept_{lying(weights), lying(bias)} {
  refuse(weights.dtype() != mx::float32 || bias.dtype() != mx::float32, "panels and biases are float32");
  refuse(weights.ndim() != 3 || weights.shape(2) != kPanelWidth || weights.size() == 0, "a panel has 16 outputs");
  refuse(bias.shape() != mx::Shape{weights.shape(0) * int(kPanelWidth)}, "there is a bias for each output");
  panels_ = {bias.shape(0), weights.shape(1), kept_[0].data<float>(), kept_[1].data<float>()};
}

NormWeights::NormWeights(const mx::array& weight, const mx::array& bias, float eps) : kept_{lying(weight), lying(bias)}, eps_(eps) {
  for (const auto* one : {&weight, &bias}) refuse(one->dtype() != mx::float32 || one->ndim() != 1 || one->size() == 0, "a norm's weight and bias are float32");
  refuse(weight.shape() != bias.shape(), "a norm's bias is as long as its weight");
}

BertLayers::BertLayers(NormWeights embedding_norm, std::vector<BertBlock> blocks, int heads) {
  const long hidden = embedding_norm.size();
  refuse(blocks.empty(), "there are layers");
  refuse(heads <= 0 || hidden % heads || hidden / heads % 16, "heads have a multiple of 16 numbers");
  for (const auto& one : blocks) {
    refuse(one.attention_norm.size() != hidden || one.output_norm.size() != hidden, "a norm is as long as the rows");
    refuse(one.qkv.panels().inputs != hidden || one.qkv.panels().outputs != 3 * hidden, "queries, keys and values are as long as the rows");
    refuse(one.output.panels().inputs != hidden || one.output.panels().outputs != hidden, "what attention gives is projected to rows");
    refuse(one.up.panels().inputs != hidden || one.down.panels().outputs != hidden, "products go on from one another");
    refuse(one.down.panels().inputs != one.up.panels().outputs, "products go on from one another");
  }
  stack_ = std::make_shared<const Stack>(Stack{std::move(embedding_norm), std::move(blocks), heads});
}

mx::array BertLayers::operator()(const mx::array& x, const std::vector<int>& lengths) const {
  const Kernels* kernels = present_kernels();
  refuse(x.dtype() != mx::float32 || x.ndim() != 2 || x.shape(1) != stack_->hidden(), "rows are float32, and as long as the weights'");
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  return mx::array(x.shape(), mx::float32, std::make_shared<BertPrimitive>(stream, stack_, texts_of(lengths, x.shape(0)), kernels), {x});
}

}  // namespace machd
