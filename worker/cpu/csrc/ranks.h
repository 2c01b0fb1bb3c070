// Processes that compute one model together, over memory that they share.
//
// Owns: the sums and the parts that ranks exchange, and the wait of one for the others.
// Never: gives up waiting. A rank that ends or hangs is noticed by the processes above, which end all others.
//
// Each exchange is a turn. A rank writes its part, says so, waits until all others have, and reads theirs. Parts
// have two places each, by turns: a rank that has said so for one turn has read all parts of the turn before.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace tokenyard {

class Ranks {
 public:
  // `page` is zeroed memory, the same for all ranks.
  Ranks(void* page, int64_t page_bytes, int rank, int size)
      : page_(static_cast<char*>(page)),
        rank_(rank),
        size_(size),
        part_bytes_((page_bytes - size * kMarkBytes) / (2 * size) / kMarkBytes * kMarkBytes) {}

  // Replaces `sums` by their sum over all ranks, added in the order of ranks: the same bits on each of them.
  void reduce(float* sums, int64_t count) {
    const Clock::time_point begin = Clock::now();
    const int64_t most = part_bytes_ / static_cast<int64_t>(sizeof(float));
    for (int64_t done = 0; done < count; done += most) {
      float* part = sums + done;
      const int64_t length = count - done < most ? count - done : most;
      exchange(part, length * static_cast<int64_t>(sizeof(float)));
      for (int64_t first = 0; first < length; first += kSummedAtOnce) {
        add_all(part, first, length - first < kSummedAtOnce ? length - first : kSummedAtOnce);
      }
    }
    exchanged_s_ += since(begin);
  }

  // Puts the rows of all ranks side by side into `all`, in the order of ranks.
  void gather(const char* own, int64_t num_rows, int64_t row_bytes, char* all) {
    const Clock::time_point begin = Clock::now();
    const int64_t num_bytes = num_rows * row_bytes;
    for (int64_t done = 0; done < num_bytes; done += part_bytes_) {
      const int64_t length = num_bytes - done < part_bytes_ ? num_bytes - done : part_bytes_;
      exchange(own + done, length);
      for (int rank = 0; rank < size_; ++rank) {
        const char* from = rank == rank_ ? own + done : part_of(rank);
        for (int64_t at = done, end; at < done + length; from += end - at, at = end) {
          const int64_t row = at / row_bytes, row_end = (row + 1) * row_bytes;
          end = row_end < done + length ? row_end : done + length;
          char* to = all + (row * size_ + rank) * row_bytes + at - row * row_bytes;
          std::memcpy(to, from, static_cast<size_t>(end - at));
        }
      }
    }
    exchanged_s_ += since(begin);
  }

  // Seconds of all exchanges so far, and those of them in which this rank waited for others.
  double exchanged_s() const { return exchanged_s_; }
  double waited_s() const { return waited_s_; }

 private:
  using Clock = std::chrono::steady_clock;

  static double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

  static constexpr int64_t kSummedAtOnce = 1024;  // within the first-level cache
  static constexpr int64_t kMarkBytes = 128;  // two cache lines: processors fetch them in pairs
  // Some microseconds, then some turns of other programs. A rank that is later has lost its core, or samples: the
  // others sleep until it wakes them.
  static constexpr int kSpins = 4000, kYields = 400;

  struct Mark {
    std::atomic<uint32_t> turn;  // counts on after its largest number from zero
    std::atomic<uint32_t> num_sleeping;
    int64_t num_bytes[2];
  };
  static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Mark) <= kMarkBytes);

  Mark& mark_of(int rank) { return *reinterpret_cast<Mark*>(page_ + rank * kMarkBytes); }

  char* part_of(int rank) {
    return page_ + size_ * kMarkBytes + (2 * rank + static_cast<int64_t>(turn_ & 1)) * part_bytes_;
  }

  // Each part of another rank is read once, and the own one where it was made.
  void add_all(float* own, int64_t first, int64_t count) {
    float sums[kSummedAtOnce];
    for (int rank = 0; rank < size_; ++rank) {
      const float* part = (rank == rank_ ? own : reinterpret_cast<const float*>(part_of(rank))) + first;
      if (rank == 0) {
        std::memcpy(sums, part, static_cast<size_t>(count) * sizeof(float));
      } else {
        for (int64_t i = 0; i < count; ++i) sums[i] += part[i];
      }
    }
    std::memcpy(own + first, sums, static_cast<size_t>(count) * sizeof(float));
  }

  void exchange(const void* own, int64_t num_bytes) {
    ++turn_;
    std::memcpy(part_of(rank_), own, static_cast<size_t>(num_bytes));
    Mark& mark = mark_of(rank_);
    mark.num_bytes[turn_ & 1] = num_bytes;
    mark.turn.store(turn_);
    if (mark.num_sleeping.load() != 0) futex(mark, FUTEX_WAKE, INT_MAX);
    const Clock::time_point begin = Clock::now();
    for (int rank = 0; rank < size_; ++rank) wait_for(mark_of(rank));
    waited_s_ += since(begin);
    for (int rank = 0; rank < size_; ++rank) {
      const Mark& other = mark_of(rank);
      if (other.num_bytes[turn_ & 1] != num_bytes) {
        std::fprintf(stderr, "rank %d exchanges %lld bytes and rank %d %lld: they do not compute the same\n", rank_,
                     static_cast<long long>(num_bytes), rank, static_cast<long long>(other.num_bytes[turn_ & 1]));
        std::abort();  // any other end would be wrong tokens
      }
    }
  }

  void wait_for(Mark& mark) const {
    for (int spins = 0; is_before(mark.turn.load(std::memory_order_acquire)); ++spins) {
      if (spins < kSpins) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
      } else if (spins < kSpins + kYields) {
        sched_yield();
      } else {
        sleep_until(mark);
      }
    }
  }

  bool is_before(uint32_t turn) const { return static_cast<int32_t>(turn - turn_) < 0; }

  // Both the count and the turn are in one order for all processes: the mark is either seen, or wakes this rank.
  void sleep_until(Mark& mark) const {
    ++mark.num_sleeping;
    for (uint32_t turn; is_before(turn = mark.turn.load());) futex(mark, FUTEX_WAIT, turn);
    --mark.num_sleeping;
  }

  static void futex(Mark& mark, int operation, uint32_t value) {
    syscall(SYS_futex, &mark.turn, operation, value, nullptr, nullptr, 0);
  }

  char* const page_;
  const int rank_, size_;
  const int64_t part_bytes_;
  uint32_t turn_ = 0;
  double exchanged_s_ = 0, waited_s_ = 0;
};

}  // namespace tokenyard
