#include "threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace machd {
namespace {

using Work = std::function<void(long, long, int)>;

// A worker looks so many times for the next kernel before it sleeps: between two kernels of a step lie some microseconds, and
// waking a thread takes tens of them.
constexpr int kLooks = 1000;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// A kernel is a round: stretches of work that whoever is free takes. The caller waits for stretches that are begun, never for a
// thread that the system has not woken yet; that one finds nothing left.
class Team {
 public:
  // Of fewer threads than are wanted where the system gives no more: the caller at least works.
  explicit Team(int wanted) : wanted_(wanted) {
    threads_.reserve(wanted - 1);
    try {
      for (int at = 1; at < wanted; ++at) threads_.emplace_back([this, at] { serve(at); });
    } catch (const std::exception&) {  // std::system_error, or no memory for one
    }
  }

  ~Team() {
    is_over_.store(true);
    {
      std::lock_guard lock(mutex_);
      ticket_.fetch_add(uint64_t{1} << 32);
    }
    woken_.notify_all();
    for (auto& one : threads_) one.join();
  }

  int wanted() const { return wanted_; }

  void run(long count, long stretch, const Work& work) {
    work_ = &work;
    count_ = count;
    stretch_ = stretch;
    stretches_ = uint32_t((count + stretch - 1) / stretch);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t round = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(round << 32 | stretches_, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard lock(mutex_); }
      woken_.notify_all();
    }
    take_stretches(uint32_t(round), 0);
    for (int look = 0; done_.load(std::memory_order_acquire) < stretches_; ++look) {
      if (look < kLooks) pause();
      else std::this_thread::yield();  // whoever has the last stretch may wait for this very processor
    }
    if (failure_ != nullptr) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  // The upper half of the ticket is the round, the lower one the number of stretches that nobody has taken. Of a round that is
  // over none are left, so a thread that comes late takes nothing, whatever the next round has written already; and a round in
  // which a stretch was taken does not end before that one is done, so what describes the round is read only then.
  void take_stretches(uint32_t round, int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t left = uint32_t(ticket);
      if (uint32_t(ticket >> 32) != round || left == 0) return;
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
      const long begin = long(stretches_ - left) * stretch_;
      try {
        (*work_)(begin, std::min(begin + stretch_, count_), thread);
      } catch (...) {
        // Out of memory, say. The caller hears of it once nobody works with its arrays any more.
        std::lock_guard lock(mutex_);
        if (failure_ == nullptr) failure_ = std::current_exception();
      }
      done_.fetch_add(1, std::memory_order_release);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  uint32_t round() const { return uint32_t(ticket_.load(std::memory_order_seq_cst) >> 32); }

  void serve(int thread) {
    uint32_t seen = 0;
    for (;;) {
      for (int look = 0; look < kLooks && round() == seen; ++look) pause();
      if (round() == seen) {
        std::unique_lock lock(mutex_);
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        woken_.wait(lock, [&] { return round() != seen; });
        sleeping_.fetch_sub(1, std::memory_order_relaxed);
      }
      seen = round();
      if (is_over_.load()) return;
      take_stretches(seen, thread);
    }
  }

  const int wanted_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable woken_;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<uint32_t> done_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> is_over_{false};
  const Work* work_ = nullptr;
  long count_ = 0, stretch_ = 1;
  uint32_t stretches_ = 0;
  std::exception_ptr failure_;  // the round's first one
};

constexpr int kMostThreads = 256;

std::mutex callers;
// Kept to the end of the process on purpose: in a forked child there are no threads that anyone could wait for.
Team* team = nullptr;
int wanted_count = std::clamp(int(std::thread::hardware_concurrency()), 1, kMostThreads);

// A child has the caller alone: it makes a team of its own when it needs one. Nobody is at work while the process is copied.
[[maybe_unused]] const int forks = pthread_atfork(
    [] { callers.lock(); },
    [] { callers.unlock(); },
    [] {
      team = nullptr;
      callers.unlock();
    });

}  // namespace

int thread_count() {
  std::lock_guard lock(callers);
  return wanted_count;
}

void set_thread_count(int count) {
  std::lock_guard lock(callers);
  wanted_count = std::clamp(count, 1, kMostThreads);
}

void share(long count, long stretch, const Work& work) {
  std::lock_guard lock(callers);
  if (wanted_count == 1 || count <= stretch) {
    if (count > 0) work(0, count, 0);
    return;
  }
  if (team == nullptr || team->wanted() != wanted_count) {
    delete std::exchange(team, nullptr);
    team = new Team(wanted_count);
  }
  team->run(count, stretch, work);
}

void* scratch(long bytes) {
  struct Kept {
    void* memory = nullptr;
    long bytes = 0;
    ~Kept() { std::free(memory); }
  };
  thread_local Kept kept;
  if (kept.bytes < bytes) {
    std::free(kept.memory);
    kept.bytes = (bytes + 63) / 64 * 64;
    kept.memory = std::aligned_alloc(64, kept.bytes);
    if (kept.memory == nullptr) {
      kept.bytes = 0;
      throw std::bad_alloc();
    }
  }
  return kept.memory;
}

}  // namespace machd
