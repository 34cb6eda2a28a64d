// The threads that share a kernel's work.
#pragma once

#include <functional>

namespace machd {

// Threads that kernels use, the calling one included; from 1 to 256, or fewer where the system gives no more.
int thread_count();

// Takes effect with the next kernel. A count out of range is taken as the nearest one within.
void set_thread_count(int count);

// Calls work(begin, end, thread) for stretches of [0, count) of about `stretch` each, on all threads, and returns when all are done.
// Which thread takes which stretch is not determined. One caller at a time; others wait. The first thing that work throws is
// thrown again when all stretches have been tried.
void share(long count, long stretch, const std::function<void(long begin, long end, int thread)>& work);

// Memory of a thread's own, aligned to 64 bytes, kept until the thread asks for more. Freed when the thread ends.
void* scratch(long bytes);

}  // namespace machd
