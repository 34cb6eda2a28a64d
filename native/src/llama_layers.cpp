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
  ScaledNorm input_norm, post_norm;
  std::optional<ScaledNorm> query_norm, key_norm, output_norm, down_norm;
  std::vector<LayerWeights> qkv, gate_up;
  LayerWeights output, down;
  long heads, kv_heads;
  float scale;
  bool is_gelu;
  int window, table;

  long hidden() const { return output.weights().outputs; }
  long projected() const { return (heads + 2 * kv_heads) * head_dim(); }
  long head_dim() const { return output.weights().inputs / heads; }
};

namespace {

// Numbers of tokens that one thread rotates and copies in about the time that another takes to join it.
constexpr long kTurnedNumbers = 16 * 1024;

ScaledNorm checked(const ScaledNorm& norm, long numbers) {
  const auto& [weight, eps] = norm;
  refuse(weight.dtype() != mx::float32 || weight.shape() != mx::Shape{int(numbers)}, "a norm's weight is float32, and as long as the rows");
  return {lying(weight), eps};
}

std::optional<ScaledNorm> checked(const std::optional<ScaledNorm>& norm, long numbers) {
  return norm ? std::optional(checked(*norm, numbers)) : std::nullopt;
}

const float* weight_of(const std::optional<ScaledNorm>& norm) { return norm ? norm->first.data<float>() : nullptr; }
float eps_of(const std::optional<ScaledNorm>& norm) { return norm ? norm->second : 0; }

// A layer's products in the order of their use, those of queries, keys and values first; x and attended: what the results of two of them are added to.
std::vector<LayerProduct> products_of(const LlamaBlock::Parts& parts, const float* x, const float* attended, const Kernels& kernels) {
  const auto& [input_norm, input_eps] = parts.input_norm;
  const auto& [post_norm, post_eps] = parts.post_norm;
  std::vector<LayerProduct> products;
  for (const auto& one : parts.qkv) products.push_back({one.weights(), input_norm.data<float>(), input_eps, nullptr, nullptr});
  products.push_back({parts.output.weights(), nullptr, 0, x, nullptr, weight_of(parts.output_norm), eps_of(parts.output_norm)});
  const auto gated = parts.is_gelu ? kernels.gelu_product : kernels.silu_product;
  products.push_back({parts.gate_up[0].weights(), post_norm.data<float>(), post_eps, nullptr, gated});
  if (parts.gate_up.size() > 1) products.back().ups = parts.gate_up[1].weights();
  products.push_back({parts.down.weights(), nullptr, 0, attended, nullptr, weight_of(parts.down_norm), eps_of(parts.down_norm)});
  return products;
}

// A layer's weights in the order of LlamaBlock's.
std::vector<const Weights*> weights_of(const LlamaBlock::Parts& parts) {
  std::vector<const Weights*> weights;
  for (const auto& one : parts.qkv) weights.push_back(&one.weights());
  weights.push_back(&parts.output.weights());
  for (const auto& one : parts.gate_up) weights.push_back(&one.weights());
  weights.push_back(&parts.down.weights());
  return weights;
}

// Raises std::invalid_argument where an adapter is not one of these layers.
void refuse_other_adapter(const LlamaAdapter::Layers& adapter, const LlamaLayers::Stack& stack) {
  refuse(adapter.size() != stack.size(), "an adapter has products of each layer");
  for (size_t layer = 0; layer < stack.size(); ++layer) {
    const auto weights = weights_of(*stack[layer]);
    refuse(adapter[layer].size() != weights.size(), "an adapter has as many products as a layer");
    for (size_t at = 0; at < weights.size(); ++at) {
      const auto& added = adapter[layer][at];
      refuse(added && added->product().a.inputs != weights[at]->inputs, "rows are as long as an adapter's");
      refuse(added && added->outputs() > weights[at]->outputs, "an adapter's outputs are those of the product");
    }
  }
}

long most_rank_of(const std::vector<LlamaAdapter>& adapters) {
  long most = 0;
  for (const auto& adapter : adapters)
    for (const auto& layer : adapter.layers())
      for (const auto& one : layer)
        if (one) most = std::max(most, one->product().a.outputs);
  return most;
}

// A pass's numbers between the steps of a layer, and between layers.
struct Memory {
  long projected, queries, mixed, attended, gated, product, passed[2], low[2];  // where each begins
  long size = 0;

  Memory(const LlamaLayers::Stack& stack, long rows, long most_rank, const Kernels& kernels) {
    const auto take = [&](long numbers) { return std::exchange(size, size + (numbers + 15) / 16 * 16); };
    const LlamaBlock::Parts& first = *stack[0];
    const long mixed_numbers = first.heads * first.head_dim();
    long gates = 0, most = 0;
    for (const auto& parts : stack) {
      const auto products = products_of(*parts, nullptr, nullptr, kernels);
      gates = std::max(gates, products[products.size() - 2].result());
      for (const auto& one : products) most = std::max(most, layer_product_numbers(one, rows, kernels));
    }
    projected = take(rows * first.projected());
    queries = take(rows * mixed_numbers);
    mixed = take(rows * mixed_numbers);
    attended = take(rows * first.hidden());
    gated = take(rows * gates);
    product = take(most);
    for (long& one : passed) one = take(rows * first.hidden());
    for (long& one : low) one = take(rows * most_rank);
  }
};

// Heads of tokens, `step` numbers from one token's to the next one's.
struct Heads {
  float* data;
  long step;
};

// Queries, keys and values of `count` tokens from one on, of a pass's `tokens`: heads + 2 kv_heads of each token, or all queries, then all
// keys, then all values.
std::array<Heads, 3> heads_of(float* projected, long tokens, long from, const LlamaBlock::Parts& parts) {
  const long sizes[] = {parts.heads * parts.head_dim(), parts.kv_heads * parts.head_dim(), parts.kv_heads * parts.head_dim()};
  const bool is_one = parts.qkv.size() == 1;
  std::array<Heads, 3> result;
  for (int at = 0; at < 3; ++at) {
    const long step = is_one ? parts.projected() : sizes[at];
    result[at] = {projected + from * step, step};
    projected += is_one ? sizes[at] : tokens * sizes[at];
  }
  return result;
}

// Normalises queries and keys, turns queries into `asking` [rows, heads, tokens, head_dim] and keys into their columns, and copies values
// into theirs; what would lie behind the last column is left out.
void take_apart(
    const std::array<Heads, 3>& projected, long rows, long tokens, const LlamaBlock::Parts& parts, const mx::array& starts, long before,
    const mx::array& cosines, const mx::array& sines, float* asking, mx::array& keys, mx::array& values, std::pair<int, int> ring,
    const Kernels& kernels) {
  const long heads = parts.heads, kv_heads = parts.kv_heads, head_dim = parts.head_dim(), half = head_dim / 2;
  const long columns = keys.shape(2);
  share(rows * tokens, std::max<long>(1, kTurnedNumbers / parts.projected()), [&](long begin, long end, int) {
    for (long at = begin; at < end; ++at) {
      const long row = at / tokens, token = at % tokens, start = starts.data<int32_t>()[row];
      const long place = std::max<long>(start, 0) + token;
      const long column = ring.first ? (place + ring.second) % ring.first : std::min(place, columns);
      const long position = std::clamp<long>(before + start + token, 0, cosines.shape(0) - 1);
      const float *cosine = cosines.data<float>() + position * half, *sine = sines.data<float>() + position * half;
      const auto turn = [&](const Heads& from, long head, const std::optional<ScaledNorm>& norm, float* to) {
        float* const own = from.data + at * from.step + head * head_dim;
        if (norm) kernels.rms_norm(own, norm->first.data<float>(), norm->second, head_dim, own, 0, 1);
        kernels.rotate(own, cosine, sine, half, to);
      };
      for (long head = 0; head < heads; ++head)
        turn(projected[0], head, parts.query_norm, asking + ((row * heads + head) * tokens + token) * head_dim);
      if (column >= columns) continue;
      for (long head = 0; head < kv_heads; ++head) {
        const long to = ((row * kv_heads + head) * columns + column) * head_dim;
        turn(projected[1], head, parts.key_norm, keys.data<float>() + to);
        std::memcpy(values.data<float>() + to, projected[2].data + at * projected[2].step + head * head_dim, sizeof(float) * head_dim);
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

// Where some of the rows are: the rows of tokens each, and the first of the inputs that are theirs: starts, then keys and values, and those
// of the prefix, of each layer.
struct Place {
  long rows, tokens;
  size_t input;
  bool has_prefix;
  std::vector<std::pair<int, int>> rings;  // of each layer

  size_t keys(size_t layer) const { return input + 1 + layer * (has_prefix ? 4 : 2); }

  bool operator==(const Place&) const = default;
};

class LayersPrimitive : public mx::Primitive {
 public:
  // row_inputs: those before the columns': rows, cosines and sines of each table, and the rows' index where there are adapters.
  LayersPrimitive(
      mx::Stream stream, std::shared_ptr<const LlamaLayers::Stack> stack, size_t row_inputs, std::vector<Place> places,
      std::vector<LlamaAdapter> adapters, const Kernels* kernels)
      : Primitive(stream), stack_(std::move(stack)), row_inputs_(row_inputs), places_(std::move(places)), adapters_(std::move(adapters)), kernels_(kernels) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    for (size_t at = 0, next = 1; at < places_.size(); ++at)
      for (size_t layer = 0; layer < stack_->size(); ++layer)
        for (size_t each : {0, 1}) outputs[next++].copy_shared_buffer(inputs[places_[at].keys(layer) + each]);  // nobody else's: see OwnPrimitive
    if (out.size() == 0) return;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const long most_rank = most_rank_of(adapters_);
    const Memory memory_plan(*stack_, long(out.size()) / (*stack_)[0]->hidden(), most_rank, *kernels_);
    mx::array memory({int(memory_plan.size)}, mx::float32, nullptr, {});
    memory.set_data(mx::allocator::malloc(memory.nbytes()));
    std::vector<mx::array> written;
    for (size_t at = 1; at < outputs.size(); ++at) written.push_back(mx::array::unsafe_weak_copy(outputs[at]));
    const std::vector<mx::array> rows(inputs.begin(), inputs.begin() + row_inputs_), columns(inputs.begin() + row_inputs_, inputs.end());
    encoder.dispatch([held = HeldInputs(rows, stream()),
                      columns = HeldInputs(columns, stream(), HeldInputs::Need::kLastAxis),
                      memory_plan,
                      memory = mx::array::unsafe_weak_copy(memory),
                      to = mx::array::unsafe_weak_copy(out),
                      written = std::move(written),
                      stack = stack_,
                      places = places_,
                      adapters = adapters_,
                      most_rank,
                      kernels = kernels_]() mutable {
      held.gather();
      columns.gather();
      float* const numbers = memory.data<float>();
      const float* from = held[0].data<float>();
      const long tokens = long(to.size()) / (*stack)[0]->hidden();
      std::optional<AdaptedRows> adapted;
      if (!adapters.empty()) adapted.emplace(held[held.size() - 1].data<int32_t>(), tokens, long(adapters.size()));
      for (size_t layer = 0; layer < stack->size(); ++layer) {
        float* const result = layer + 1 == stack->size() ? to.data<float>() : numbers + memory_plan.passed[layer % 2];
        Layer here{*(*stack)[layer], layer, stack->size(), tokens, {}};
        for (size_t at = 0; adapted && at < adapters[0].layers()[layer].size(); ++at) {
          auto& one = here.adapted.emplace_back(AdaptedProduct{&*adapted, {}, numbers + memory_plan.low[at % 2], most_rank});
          for (const auto& adapter : adapters) one.adapters.push_back(adapter.product(layer, at));
        }
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
    return another.stack_ == stack_ && another.row_inputs_ == row_inputs_ && another.places_ == places_ && another.adapters_.empty() && adapters_.empty() &&
        another.kernels_ == kernels_;
  }

 private:
  struct Layer {
    const LlamaBlock::Parts& parts;
    size_t number, count;  // of all layers
    long tokens;           // of the pass
    std::vector<AdaptedProduct> adapted;  // one for each of the layer's weights; none where no row has an adapter
  };

  static void compute(
      const Layer& layer, const float* x, const HeldInputs& held, const HeldInputs& columns, const std::vector<Place>& places, const Memory& plan, float* memory,
      std::vector<mx::array>& written, float* out, const Kernels& kernels) {
    const LlamaBlock::Parts& parts = layer.parts;
    const long head_dim = parts.head_dim();
    float *const projected = memory + plan.projected, *const asking = memory + plan.queries, *const mixed = memory + plan.mixed;
    float *const attended = memory + plan.attended, *const gated = memory + plan.gated, *const product = memory + plan.product;
    auto steps = products_of(parts, x, attended, kernels);
    for (auto one = layer.adapted.begin(); auto& each : steps) {
      if (one == layer.adapted.end()) break;
      each.adapters = &*one++;
      if (each.ups.outputs > 0) each.up_adapters = &*one++;
    }
    auto step = steps.begin();
    for (float* to = projected; step != steps.begin() + parts.qkv.size(); to += layer.tokens * (step++)->result())
      compute_layer_product(*step, x, layer.tokens, product, to, kernels);
    const size_t row_inputs = held.size();
    const mx::array &cosines = held[1 + 2 * parts.table], &sines = held[2 + 2 * parts.table];
    long before = 0;  // tokens
    for (size_t at = 0; at < places.size(); ++at) {
      const auto& [rows, tokens, input, has_prefix, rings] = places[at];
      const auto ring = rings.empty() ? std::pair(0, 0) : rings[layer.number];
      const mx::array& starts = columns[input - row_inputs];
      const size_t first = 2 * (at * layer.count + layer.number);
      mx::array &keys = written[first], &values = written[first + 1];
      const auto prefix = has_prefix ? columns_at(columns, places[at].keys(layer.number) + 2 - row_inputs) : std::nullopt;
      float* const own_asking = asking + before * parts.heads * head_dim;
      take_apart(
          heads_of(projected, layer.tokens, before, parts), rows, tokens, parts, starts, prefix ? prefix->keys.shape(2) : 0, cosines, sines,
          own_asking, keys, values, ring, kernels);
      const Queries queries{own_asking, rows, parts.heads, tokens, head_dim, parts.heads * tokens * head_dim, tokens * head_dim, head_dim};
      compute_attention(queries, {keys, values, ring.first, ring.second}, starts, prefix, parts.scale, parts.window, mixed + before * parts.heads * head_dim, kernels);
      before += rows * tokens;
    }
    compute_layer_product(*step++, mixed, layer.tokens, product, attended, kernels);
    compute_layer_product(*step++, attended, layer.tokens, product, gated, kernels);
    compute_layer_product(*step++, gated, layer.tokens, product, out, kernels);
  }

  std::shared_ptr<const LlamaLayers::Stack> stack_;
  size_t row_inputs_;
  std::vector<Place> places_;
  std::vector<LlamaAdapter> adapters_;
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
    const ScaledNorm& input_norm,
    const ScaledNorm& post_norm,
    std::vector<LayerWeights> qkv,
    LayerWeights output,
    std::vector<LayerWeights> gate_up,
    LayerWeights down,
    int heads,
    int kv_heads,
    float scale,
    const std::optional<ScaledNorm>& query_norm,
    const std::optional<ScaledNorm>& key_norm,
    const std::optional<ScaledNorm>& output_norm,
    const std::optional<ScaledNorm>& down_norm,
    const std::string& activation,
    int window,
    int table) {
  const long hidden = output.weights().outputs, mixed = output.weights().inputs;
  refuse(heads <= 0 || kv_heads <= 0 || heads % kv_heads || mixed % heads || mixed / heads % 16, "heads are a multiple of those of the keys, of 16 numbers");
  const long head_dim = mixed / heads;
  std::vector<long> outputs;
  for (const auto& one : qkv) outputs.push_back(one.weights().inputs == hidden ? one.weights().outputs : 0);
  const bool is_one = outputs == std::vector{head_dim * (heads + 2 * kv_heads)};
  refuse(!is_one && outputs != std::vector{mixed, head_dim * kv_heads, head_dim * kv_heads}, "queries, keys and values have as many numbers as heads");
  refuse(down.weights().outputs != hidden, "products go on from one another");
  refuse(gate_up.empty() || gate_up.size() > 2, "products are of gates and ups");
  for (const auto& one : gate_up) {
    const Weights &first = gate_up[0].weights(), &own = one.weights();
    refuse(own.inputs != hidden, "products go on from one another");
    refuse(own.outputs * long(gate_up.size()) != 2 * down.weights().inputs, "there are as many ups as gates");
    refuse(own.format != first.format || own.bits != first.bits, "gates and ups are packed alike");
  }
  refuse(activation != "silu" && activation != "gelu", "an activation is silu or gelu");
  refuse(window < 0 || table < 0, "a window and a table are not negative");
  parts_ = std::make_shared<const Parts>(Parts{
      checked(input_norm, hidden), checked(post_norm, hidden), checked(query_norm, head_dim), checked(key_norm, head_dim),
      checked(output_norm, hidden), checked(down_norm, hidden), std::move(qkv), std::move(gate_up), std::move(output), std::move(down), heads,
      kv_heads, scale, activation == "gelu", window, table});
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
    const mx::array& x,
    const std::vector<std::pair<mx::array, mx::array>>& tables,
    const std::vector<Columns>& columns,
    const std::optional<mx::array>& index,
    const std::vector<LlamaAdapter>& adapters) const {
  const LlamaBlock::Parts& parts = *(*stack_)[0];
  refuse(x.dtype() != mx::float32 || x.ndim() < 1 || x.shape(-1) != parts.hidden(), "rows are float32, and as long as the weights'");
  const int heads = int(parts.heads), head_dim = int(parts.head_dim());
  for (const auto& block : *stack_) refuse(block->table >= int(tables.size()), "there is a table for each layer");
  const mx::Stream stream = mx::default_stream(mx::Device::cpu);
  const size_t layers = stack_->size();
  std::vector<mx::array> inputs = {x};
  for (const auto& [cosines, sines] : tables) {
    refuse_other_tables(cosines, sines, head_dim);
    inputs.insert(inputs.end(), {cosines, sines});
  }
  refuse(index.has_value() == adapters.empty(), "an index comes with adapters");
  if (index) {
    refuse(index->dtype() != mx::int32 || long(index->size()) * parts.hidden() != long(x.size()), "indices are int32, one for each row");
    for (const auto& one : adapters) refuse_other_adapter(one.layers(), *stack_);
    inputs.push_back(*index);
  }
  const size_t row_inputs = inputs.size();
  std::vector<mx::Shape> shapes = {x.shape()};
  std::vector<Place> places;
  long tokens = 0;
  for (const auto& one : columns) {
    refuse(one.starts.ndim() != 1 || one.tokens < 0, "starts are int32, one for each row");
    const int rows = one.starts.shape(0);
    const bool has_prefix = !one.prefix_keys.empty();
    refuse(one.keys.size() != layers || one.values.size() != layers, "there are keys and values of each layer");
    refuse(one.prefix_keys.size() != one.prefix_values.size() || (has_prefix && one.prefix_keys.size() != layers), "a prefix has keys and values of each layer");
    refuse(!one.rings.empty() && (one.rings.size() != layers || has_prefix), "there is a ring for each layer, and no prefix before it");
    places.push_back({rows, one.tokens, inputs.size(), has_prefix, one.rings});
    inputs.push_back(one.starts);
    for (size_t layer = 0; layer < layers; ++layer) {
      const mx::array &keys = one.keys[layer], &values = one.values[layer];
      std::optional<mx::array> prefix_keys, prefix_values;
      if (has_prefix) prefix_keys = one.prefix_keys[layer], prefix_values = one.prefix_values[layer];
      refuse_other_columns({rows, heads, one.tokens, head_dim}, keys, values, one.starts, prefix_keys, prefix_values);
      refuse(keys.shape(1) != parts.kv_heads || values.shape() != keys.shape(), "keys and values have as many heads");
      const auto [ring, shift] = one.rings.empty() ? std::pair(0, 0) : one.rings[layer];
      refuse(ring < 0 || shift < 0 || (ring > keys.shape(2) && shift > 0), "the columns of a ring are not negative, and are there");
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
      std::move(shapes), dtypes, std::make_shared<LayersPrimitive>(stream, stack_, row_inputs, std::move(places), adapters, present_kernels()), inputs);
}

}  // namespace machd
