#include "large_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/device.h"
#include "mlx/ops.h"

namespace machd {

namespace mx = mlx::core;

#if defined(__linux__) && defined(MADV_HUGEPAGE)
namespace {

constexpr size_t kPageBytes = size_t(1) << 21;
constexpr size_t kRegionBytes = 32 * kPageBytes;  // what is not used of one takes no memory
constexpr size_t kAlignment = 64;

// From this size on the C library maps memory for an array alone, whatever it has learnt (M_MMAP_THRESHOLD_MAX of glibc).
constexpr size_t kOwnMappingBytes = size_t(1) << 25;

size_t rounded_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Memory that arrays are put into one behind another, given back with the last of them.
class Region {
 public:
  explicit Region(size_t bytes) : bytes_(bytes + kPageBytes) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    begin_ = free_ = rounded_up(reinterpret_cast<uintptr_t>(memory_), kPageBytes);
    madvise(reinterpret_cast<void*>(begin_), bytes, MADV_HUGEPAGE);
  }
  ~Region() { munmap(memory_, bytes_); }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  bool holds(const void* address) const { return reinterpret_cast<uintptr_t>(address) - begin_ < bytes_ - kPageBytes; }
  bool has_room(size_t bytes) const { return free_ + bytes <= begin_ + bytes_ - kPageBytes; }
  char* take(size_t bytes) { return reinterpret_cast<char*>(std::exchange(free_, free_ + bytes)); }

 private:
  void* memory_;
  size_t bytes_;
  uintptr_t begin_, free_;
};

std::mutex regions_lock;
std::vector<std::weak_ptr<Region>> regions;

bool lies_in_a_region(const void* address) {
  std::erase_if(regions, [](const auto& one) { return one.expired(); });
  return std::any_of(regions.begin(), regions.end(), [&](const auto& one) {
    const auto region = one.lock();
    return region != nullptr && region->holds(address);
  });
}

std::shared_ptr<Region> region_with_room(size_t bytes) {
  for (const auto& one : regions)
    if (auto region = one.lock(); region != nullptr && region->has_room(bytes)) return region;
  auto region = std::make_shared<Region>(std::max(kRegionBytes, rounded_up(bytes, kPageBytes)));
  regions.push_back(region);
  return region;
}

// MLX's allocator for the CPU writes an array's size in front of it, and a buffer's address is that of the size.
bool has_size_in_front(const mx::array& array) {
  auto buffer = array.buffer();
  return buffer.ptr() != nullptr && static_cast<size_t*>(buffer.ptr()) + 1 == buffer.raw_ptr();
}

}  // namespace

mx::array in_large_pages(const mx::array& array) {
  mx::array from = mx::contiguous(array, false, mx::default_stream(mx::Device::cpu));
  from.eval();
  const size_t bytes = from.nbytes();
  if (bytes == 0 || !has_size_in_front(from)) return array;
  char* const data = from.data<char>();
  std::lock_guard lock(regions_lock);
  if (lies_in_a_region(data)) return from;
  if (bytes >= kOwnMappingBytes) {
#if defined(MADV_COLLAPSE)
    const auto begin = rounded_up(reinterpret_cast<uintptr_t>(data), kPageBytes);
    const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPageBytes * kPageBytes;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_COLLAPSE);  // or it stays as it is
#endif
    return from;
  }
  const size_t taken = kAlignment + rounded_up(bytes, kAlignment);
  auto region = region_with_room(taken);
  char* const to = region->take(taken) + kAlignment;
  const size_t size = bytes;
  std::memcpy(to - sizeof(size), &size, sizeof(size));
  std::memcpy(to, data, bytes);
  mx::allocator::Data kept(mx::allocator::Buffer(to - sizeof(size)), [region = std::move(region)](mx::allocator::Buffer) {});
  return mx::array(std::move(kept), from.shape(), from.dtype());
}

#else

mx::array in_large_pages(const mx::array& array) { return array; }

#endif

}  // namespace machd
