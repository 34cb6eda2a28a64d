#include "llama_layers.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "layer_attention.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "threads.h"
#include "weight_arrays.h"

namespace machd {

namespace mx = mlx::core;

struct LlamaBlock::Parts {
  mx::array input_norm, post_norm;
  float input_eps, post_eps;
  LayerWeights qkv, output, gate_up, down;
  long heads, kv_heads;
  float scale;

  long hidden() const { return qkv.weights().inputs; }
  long head_dim() const { return output.weights().inputs / heads; }
};

namespace {

// Numbers of tokens that one thread rotates and copies in about the time that another takes to join it.
constexpr long kTurnedNumbers = 16 * 1024;

// A layer's products in the order of their use; x and attended: what the results of two of them are added to.
std::array<LayerProduct, 4> products_of(const LlamaBlock::Parts& parts, const float* x, const float* attended) {
  return {{
      {parts.qkv.weights(), parts.input_norm.data<float>(), parts.input_eps, nullptr, false},
      {parts.output.weights(), nullptr, 0, x, false},
      {parts.gate_up.weights(), parts.post_norm.data<float>(), parts.post_eps, nullptr, true},
      {parts.down.weights(), nullptr, 0, attended, false},
  }};
}

// A pass's numbers between the steps of a layer, and between layers.
struct Memory {
  long projected, queries, mixed, attended, gated, product, passed[2];  // where each begins
  long size = 0;

  Memory(const LlamaLayers::Stack& stack, long rows, const Kernels& kernels) {
    const auto take = [&](long numbers) { return std::exchange(size, size + (numbers + 15) / 16 * 16); };
    const LlamaBlock::Parts& first = *stack[0];
    const long mixed_numbers = first.heads * first.head_dim();
    long gates = 0, most = 0;
    for (const auto& parts : stack) {
      const auto products = products_of(*parts, nullptr, nullptr);
      gates = std::max(gates, products[2].result());
      for (const auto& one : products) most = std::max(most, layer_product_numbers(one, rows, kernels));
    }
    projected = take(rows * first.qkv.weights().outputs);
    queries = take(rows * mixed_numbers);
    mixed = take(rows * mixed_numbers);
    attended = take(rows * first.hidden());
    gated = take(rows * gates);
    product = take(most);
    for (long& one : passed) one = take(rows * first.hidden());
  }
};

// Turns queries into `asking` [rows, heads, tokens, head_dim] and keys into their columns, and copies values into theirs; what would
// lie behind the last column is left out. projected: [rows, tokens, heads + 2 kv_heads, head_dim].
void take_apart(
    const float* projected, long rows, long tokens, const LlamaBlock::Parts& parts, const mx::array& starts, long before, const mx::array& cosines,
    const mx::array& sines, float* asking, mx::array& keys, mx::array& values, const Kernels& kernels) {
  const long heads = parts.heads, kv_heads = parts.kv_heads, head_dim = parts.head_dim(), half = head_dim / 2;
  const long all = heads + 2 * kv_heads, columns = keys.shape(2);
  share(rows * tokens, std::max<long>(1, kTurnedNumbers / (all * head_dim)), [&](long begin, long end, int) {
    for (long at = begin; at < end; ++at) {
      const long row = at / tokens, token = at % tokens, start = starts.data<int32_t>()[row];
      const long column = std::clamp<long>(start, 0, columns) + token;
      const long position = std::clamp<long>(before + start + token, 0, cosines.shape(0) - 1);
      const float* from = projected + at * all * head_dim;
      const float *cosine = cosines.data<float>() + position * half, *sine = sines.data<float>() + position * half;
      for (long head = 0; head < heads; ++head)
        kernels.rotate(from + head * head_dim, cosine, sine, half, asking + ((row * heads + head) * tokens + token) * head_dim);
      if (column >= columns) continue;
      for (long head = 0; head < kv_heads; ++head) {
        const long to = ((row * kv_heads + head) * columns + column) * head_dim;
        kernels.rotate(from + (heads + head) * head_dim, cosine, sine, half, keys.data<float>() + to);
        std::memcpy(values.data<float>() + to, from + (heads + kv_heads + head) * head_dim, sizeof(float) * head_dim);
      }
    }
  });
}

// The columns that come in, and from now on nobody else's: MLX lets an operation with several outputs take over no input's memory.
class OwnPrimitive : public mx::UnaryPrimitive {
 public:
  using UnaryPrimitive::UnaryPrimitive;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    if (takes_over(inputs[0], out) || out.size() == 0) return;
    mx::cpu::get_command_encoder(stream()).dispatch([held = HeldInputs(inputs, stream()), to = mx::array::unsafe_weak_copy(out)]() mutable {
      held.gather();
      std::memcpy(to.data<char>(), held[0].data<char>(), to.nbytes());
    });
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return "MachdOwn"; }
  bool is_equivalent(const mx::Primitive&) const override { return false; }  // one for each that writes
};

// Inputs before those of the columns: rows, cosines and sines.
constexpr size_t kRowInputs = 3;

// Where some of the rows are: the rows of tokens each, and the first of the inputs that are theirs: starts, then keys and values, and those
// of the prefix, of each layer.
struct Place {
  long rows, tokens;
  size_t input;
  bool has_prefix;

  size_t keys(size_t layer) const { return input + 1 + layer * (has_prefix ? 4 : 2); }

  bool operator==(const Place&) const = default;
};

class LayersPrimitive : public mx::Primitive {
 public:
  LayersPrimitive(mx::Stream stream, std::shared_ptr<const LlamaLayers::Stack> stack, std::vector<Place> places, const Kernels* kernels)
      : Primitive(stream), stack_(std::move(stack)), places_(std::move(places)), kernels_(kernels) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    for (size_t at = 0, next = 1; at < places_.size(); ++at)
      for (size_t layer = 0; layer < stack_->size(); ++layer)
        for (size_t each : {0, 1}) outputs[next++].copy_shared_buffer(inputs[places_[at].keys(layer) + each]);  // nobody else's: see OwnPrimitive
    if (out.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const Memory memory_plan(*stack_, long(out.size()) / (*stack_)[0]->hidden(), *kernels_);
    mx::array memory({int(memory_plan.size)}, mx::float32, nullptr, {});
    memory.set_data(mx::allocator::malloc(memory.nbytes()));
    std::vector<mx::array> written;
    for (size_t at = 1; at < outputs.size(); ++at) written.push_back(mx::array::unsafe_weak_copy(outputs[at]));
    const std::vector<mx::array> rows(inputs.begin(), inputs.begin() + kRowInputs), columns(inputs.begin() + kRowInputs, inputs.end());
    encoder.dispatch([held = HeldInputs(rows, stream()),
                      columns = HeldInputs(columns, stream(), HeldInputs::Need::kLastAxis),
                      memory_plan,
                      memory = mx::array::unsafe_weak_copy(memory),
                      to = mx::array::unsafe_weak_copy(out),
                      written = std::move(written),
                      stack = stack_,
                      places = places_,
                      kernels = kernels_]() mutable {
      held.gather();
      columns.gather();
      float* const numbers = memory.data<float>();
      const float* from = held[0].data<float>();
      for (size_t layer = 0; layer < stack->size(); ++layer) {
        float* const result = layer + 1 == stack->size() ? to.data<float>() : numbers + memory_plan.passed[layer % 2];
        const Layer here{*(*stack)[layer], layer, stack->size(), long(to.size()) / (*stack)[layer]->hidden()};
        compute(here, from, held, columns, places, memory_plan, numbers, written, result, *kernels);
        from = result;
      }
    });
    encoder.add_temporary(std::move(memory));
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("machd_native computes on the CPU only");
  }

  const char* name() const override { return "MachdLlamaLayers"; }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& another = static_cast<const LayersPrimitive&>(other);
    return another.stack_ == stack_ && another.places_ == places_ && another.kernels_ == kernels_;
  }

 private:
  struct Layer {
    const LlamaBlock::Parts& parts;
    size_t number, count;  // of all layers
    long tokens;           // of the pass
  };

  static void compute(
      const Layer& layer, const float* x, const HeldInputs& held, const HeldInputs& columns, const std::vector<Place>& places, const Memory& plan, float* memory,
      std::vector<mx::array>& written, float* out, const Kernels& kernels) {
    const LlamaBlock::Parts& parts = layer.parts;
    const long head_dim = parts.head_dim();
    float *const projected = memory + plan.projected, *const asking = memory + plan.queries, *const mixed = memory + plan.mixed;
    float *const attended = memory + plan.attended, *const gated = memory + plan.gated, *const product = memory + plan.product;
    const auto steps = products_of(parts, x, attended);
    compute_layer_product(steps[0], x, layer.tokens, product, projected, kernels);
    long before = 0;  // tokens
    for (size_t at = 0; at < places.size(); ++at) {
      const auto& [rows, tokens, input, has_prefix] = places[at];
      const mx::array& starts = columns[input - kRowInputs];
      const size_t first = 2 * (at * layer.count + layer.number);
      mx::array &keys = written[first], &values = written[first + 1];
      const auto prefix = has_prefix ? columns_at(columns, places[at].keys(layer.number) + 2 - kRowInputs) : std::nullopt;
      float* const own_asking = asking + before * parts.heads * head_dim;
      take_apart(
          projected + before * steps[0].result(), rows, tokens, parts, starts, prefix ? prefix->keys.shape(2) : 0, held[1], held[2], own_asking,
          keys, values, kernels);
      const Queries queries{own_asking, rows, parts.heads, tokens, head_dim, parts.heads * tokens * head_dim, tokens * head_dim, head_dim};
      compute_attention(queries, {keys, values}, starts, prefix, parts.scale, 0, mixed + before * parts.heads * head_dim, kernels);
      before += rows * tokens;
    }
    compute_layer_product(steps[1], mixed, layer.tokens, product, attended, kernels);
    compute_layer_product(steps[2], attended, layer.tokens, product, gated, kernels);
    compute_layer_product(steps[3], gated, layer.tokens, product, out, kernels);
  }

  std::shared_ptr<const LlamaLayers::Stack> stack_;
  std::vector<Place> places_;
  const Kernels* kernels_;  // those of when the graph was built
};

}  // namespace

LayerWeights::LayerWeights(
    const mx::array& weights,
    const std::optional<mx::array>& scales,
    const std::optional<mx::array>& biases,
    const std::string& mode,
    int group,
    int bits)
    : kept_{lying(weights)}, weights_(described(weights, 2, scales, biases, mode, group, bits)) {
  refuse(present_kernels()->find_product(weights_.format, weights_.bits) == nullptr, "no kernel computes this here");
  refuse(weights_.inputs == 0 || weights_.outputs == 0, "there are weights");
  weights_.packed = kept_[0].data<char>();
  if (scales) weights_.scales = kept_.emplace_back(lying(*scales)).data<char>();
  if (biases) weights_.biases = kept_.emplace_back(lying(*biases)).data<char>();
}

LlamaBlock::LlamaBlock(
    const mx::array& input_norm,
    const mx::array& post_norm,
    float input_eps,
    float post_eps,
    LayerWeights qkv,
    LayerWeights output,
    LayerWeights gate_up,
    LayerWeights down,
    int heads,
    int kv_heads,
    float scale) {
  const long hidden = qkv.weights().inputs, mixed = output.weights().inputs;
  refuse(heads <= 0 || kv_heads <= 0 || heads % kv_heads || mixed % heads || mixed / heads % 16, "heads are a multiple of those of the keys, of 16 numbers");
  refuse(qkv.weights().outputs != mixed / heads * (heads + 2 * kv_heads), "queries, keys and values have as many numbers as heads");
  refuse(output.weights().outputs != hidden || down.weights().outputs != hidden || gate_up.weights().inputs != hidden, "products go on from one another");
  refuse(gate_up.weights().outputs != 2 * down.weights().inputs, "there are as many ups as gates");
  for (const auto* norm : {&input_norm, &post_norm})
    refuse(norm->dtype() != mx::float32 || norm->shape() != mx::Shape{int(hidden)}, "a norm's weight is float32, and as long as the rows");
  parts_ = std::make_shared<const Parts>(
      Parts{lying(input_norm), lying(post_norm), input_eps, post_eps, std::move(qkv), std::move(output), std::move(gate_up), std::move(down), heads, kv_heads, scale});
}

LlamaLayers::LlamaLayers(const std::vector<LlamaBlock>& blocks) {
  Stack stack;
  for (const auto& one : blocks) stack.push_back(one.parts());
  refuse(stack.empty(), "there are layers");
  for (const auto& one : stack) {
    const bool is_alike = one->hidden() == stack[0]->hidden() && one->heads == stack[0]->heads && one->head_dim() == stack[0]->head_dim();
    refuse(!is_alike || one->kv_heads != stack[0]->kv_heads, "layers have rows and heads of one size");
  }
  stack_ = std::make_shared<const Stack>(std::move(stack));
}

std::vector<mx::array> LlamaLayers::operator()(
    const mx::array& x, const mx::array& cosines, const mx::array& sines, const std::vector<Columns>& columns) const {
  const LlamaBlock::Parts& parts = *(*stack_)[0];
  refuse(x.dtype() != mx::float32 || x.ndim() < 1 || x.shape(-1) != parts.hidden(), "rows are float32, and as long as the weights'");
  const int heads = int(parts.heads), head_dim = int(parts.head_dim());
  refuse_other_tables(cosines, sines, head_dim);
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  const size_t layers = stack_->size();
  std::vector<mx::array> inputs = {x, cosines, sines};
  std::vector<mx::Shape> shapes = {x.shape()};
  std::vector<Place> places;
  long tokens = 0;
  for (const auto& one : columns) {
    refuse(one.starts.ndim() != 1 || one.tokens < 0, "starts are int32, one for each row");
    const int rows = one.starts.shape(0);
    const bool has_prefix = !one.prefix_keys.empty();
    refuse(one.keys.size() != layers || one.values.size() != layers, "there are keys and values of each layer");
    refuse(one.prefix_keys.size() != one.prefix_values.size() || (has_prefix && one.prefix_keys.size() != layers), "a prefix has keys and values of each layer");
    places.push_back({rows, one.tokens, inputs.size(), has_prefix});
    inputs.push_back(one.starts);
    for (size_t layer = 0; layer < layers; ++layer) {
      const mx::array &keys = one.keys[layer], &values = one.values[layer];
      std::optional<mx::array> prefix_keys, prefix_values;
      if (has_prefix) prefix_keys = one.prefix_keys[layer], prefix_values = one.prefix_values[layer];
      refuse_other_columns({rows, heads, one.tokens, head_dim}, keys, values, one.starts, prefix_keys, prefix_values);
      refuse(keys.shape(1) != parts.kv_heads || values.shape() != keys.shape(), "keys and values have as many heads");
      for (const auto* each : {&keys, &values}) {
        inputs.emplace_back(each->shape(), mx::float32, std::make_shared<OwnPrimitive>(stream), std::vector<mx::array>{*each});
        shapes.push_back(each->shape());
      }
      if (has_prefix) inputs.insert(inputs.end(), {*prefix_keys, *prefix_values});
    }
    tokens += long(rows) * one.tokens;
  }
  refuse(tokens != long(x.size()) / parts.hidden(), "there are as many tokens as rows have");
  const std::vector<mx::Dtype> dtypes(shapes.size(), mx::float32);
  return mx::array::make_arrays(
      std::move(shapes), dtypes, std::make_shared<LayersPrimitive>(stream, stack_, std::move(places), present_kernels()), inputs);
}

}  // namespace machd
