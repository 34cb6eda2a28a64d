// The choice of an instruction set at run time.
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace machd {

namespace plain {
extern const Kernels kernels;
}
#if defined(__x86_64__)
namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
#elif defined(__ARM_NEON)
namespace neon {
extern const Kernels kernels;
}
#endif

const Kernels* choose_kernels(const char* wanted) {
  const Kernels* usable[2] = {};
  int count = 0;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("x86-64-v4")) usable[count++] = &avx512::kernels;
  if (__builtin_cpu_supports("x86-64-v3")) usable[count++] = &avx2::kernels;
#elif defined(__ARM_NEON)
  usable[count++] = &neon::kernels;
#endif
  if (wanted == nullptr || *wanted == 0) return usable[0];
  if (std::strcmp(wanted, plain::kernels.name) == 0) return &plain::kernels;
  for (int at = 0; at < count; ++at)
    if (std::strcmp(usable[at]->name, wanted) == 0) return usable[at];
  throw std::invalid_argument("this processor has no kernels named " + std::string(wanted));
}

}  // namespace machd
