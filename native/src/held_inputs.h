// What an operation's kernel reads and writes: addresses that hold until it has run, and checks of what comes in.
#pragma once

#include <stdexcept>
#include <vector>

#include "kernels.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace machd {

// Raises std::invalid_argument with `what` if something is wrong.
inline void refuse(bool is_wrong, const char* what) {
  if (is_wrong) throw std::invalid_argument(what);
}

// The kernels that serve now; null where this processor has none.
const Kernels* chosen_kernels();

// The same; raises std::invalid_argument without any.
const Kernels* present_kernels();

// Raises std::invalid_argument unless tables of a rotation go with heads of so many numbers.
void refuse_other_tables(const mlx::core::array& cosines, const mlx::core::array& sines, int head_dim);

// An array computed and with all numbers one after another.
mlx::core::array lying(const mlx::core::array& one);

inline bool is_of_16_or_32_bits(mlx::core::Dtype type) {
  return type == mlx::core::float32 || type == mlx::core::float16 || type == mlx::core::bfloat16;
}

// An operation's inputs as its kernel needs them. The kernel runs later, on the stream's thread, when gather() has brought together
// what lay apart in memory.
class HeldInputs {
 public:
  enum class Need { kContiguous, kLastAxis };  // all numbers one after another, or those of the last axis

  HeldInputs(const std::vector<mlx::core::array>& inputs, mlx::core::Stream stream, Need need = Need::kContiguous);

  void gather();

  const mlx::core::array& operator[](size_t at) const { return held_[at]; }
  size_t size() const { return held_.size(); }

 private:
  struct Apart {
    mlx::core::array from;
    mlx::core::array to;
  };

  std::vector<mlx::core::array> held_;
  std::vector<Apart> apart_;
};

}  // namespace machd
