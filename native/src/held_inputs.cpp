#include "held_inputs.h"

#include <atomic>
#include <cstring>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "operations.h"

namespace machd {
namespace {

namespace mx = mlx::core;

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels = choose_kernels(nullptr);
  return kernels;
}

char* gather_axis(const mx::array& from, int axis, const char* begin, char* to) {
  if (axis == int(from.ndim())) {
    std::memcpy(to, begin, from.itemsize());
    return to + from.itemsize();
  }
  const long step = from.strides(axis) * long(from.itemsize());
  for (int at = 0; at < from.shape(axis); ++at) to = gather_axis(from, axis + 1, begin + at * step, to);
  return to;
}

}  // namespace

const Kernels* chosen_kernels() { return chosen(); }

const Kernels* present_kernels() {
  const Kernels* kernels = chosen();
  refuse(kernels == nullptr, "no kernel computes this here");
  return kernels;
}

void refuse_other_tables(const mx::array& cosines, const mx::array& sines, int head_dim) {
  for (const auto* one : {&cosines, &sines}) refuse(one->dtype() != mx::float32 || one->ndim() != 2, "tables are float32 with two axes");
  refuse(cosines.shape() != sines.shape() || cosines.shape(0) == 0, "there are as many sines as cosines");
  refuse(head_dim == 0 || cosines.shape(1) * 2 != head_dim, "a table has half as many numbers as a head");
}

std::string instruction_set() {
  const Kernels* kernels = chosen();
  return kernels == nullptr ? "" : kernels->name;
}

void use_instruction_set(const std::string& name) { chosen() = choose_kernels(name.c_str()); }

mx::array lying(const mx::array& one) {
  mx::array result = mx::contiguous(one, false, mx::default_stream(mx::Device::cpu));
  result.eval();
  return result;
}

HeldInputs::HeldInputs(const std::vector<mx::array>& inputs, mx::Stream stream, Need need) {
  auto& encoder = mx::cpu::get_command_encoder(stream);
  for (const auto& one : inputs) {
    const bool lies_well = need == Need::kContiguous ? one.flags().row_contiguous : one.ndim() == 0 || one.shape(-1) < 2 || one.strides(-1) == 1;
    if (lies_well) {
      held_.push_back(mx::array::unsafe_weak_copy(one));
      continue;
    }
    mx::array gathered(one.shape(), one.dtype(), nullptr, {});
    gathered.set_data(mx::allocator::malloc(gathered.nbytes()));
    held_.push_back(mx::array::unsafe_weak_copy(gathered));
    apart_.push_back({mx::array::unsafe_weak_copy(one), mx::array::unsafe_weak_copy(gathered)});
    encoder.add_temporary(std::move(gathered));
  }
}

void HeldInputs::gather() {
  for (auto& one : apart_)
    if (one.from.size() > 0) gather_axis(one.from, 0, one.from.data<char>(), one.to.data<char>());
}

}  // namespace machd
