// A few threads that compute together.
//
// Owns: the threads, which start with the team and end with it, and who takes which piece of work.
// Never: knows what is computed.
//
// Work comes as phases, cut into pieces. Each thread takes its share of them, one after the other, then what is left
// of the others'; a phase begins when all pieces of the one before are done. Nobody waits for a thread that has taken
// nothing: on a machine with other things to do, a helper that the system does not run costs its help and no more,
// where a barrier would wait for it.
#pragma once

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace tokenyard {

// Items [begin, end) of a phase, done by a thread with this number.
using Work = std::function<void(int64_t begin, int64_t end, int thread)>;

struct Phase {
  int64_t num_items;
  Work work;
};

class Team {
 public:
  static constexpr size_t kMostPhases = 32;  // a layer that is divided and adapted has 24

  explicit Team(int num_threads) : num_threads_(num_threads), num_left_(kMostPhases * static_cast<size_t>(num_threads)) {
    for (int thread = 1; thread < num_threads; ++thread) {
      helpers_.emplace_back([this, thread] { help(thread); });
    }
  }

  ~Team() {
    is_over_ = true;
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int num_threads() const { return num_threads_; }

  // Pieces that a phase is cut into, if it has as many items.
  int64_t most_pieces() const { return num_threads_ * kPiecesPerThread; }

  // Does the phases one after another, the calling thread as number 0. For one caller at a time.
  void run(const std::vector<Phase>& phases) {
    if (phases.size() > kMostPhases) __builtin_trap();  // an error of ours, which would be written past the ends
    if (num_threads_ == 1) {
      for (const Phase& phase : phases) phase.work(0, phase.num_items, 0);
      return;
    }
    phases_ = &phases;
    num_phases_.store(phases.size(), std::memory_order_relaxed);
    const uint32_t round = round_.load(std::memory_order_relaxed) + 1;
    open(0, round);
    round_.store(round, std::memory_order_release);
    round_.notify_all();
    for (size_t phase = 0; phase < phases.size(); ++phase) {
      for (int spins = 0; !is_open(phase, round); ++spins) rest(spins);
      while (take_piece(phase, round, 0)) {
      }
    }
    for (int spins = 0; num_done_[phases.size() - 1].value.load(std::memory_order_acquire) != num_pieces(phases.back());
         ++spins) {
      rest(spins);
    }
  }

 private:
  // Enough that the last piece of a phase is short, few enough that taking one costs nothing.
  static constexpr int64_t kPiecesPerThread = 8;
  // Some tens of microseconds: about as long as sleeping and being woken takes.
  static constexpr int kSpins = 2000;
  // A helper that has waited for so many turns of other programs leaves the round: for longer than the largest piece of
  // a prompt takes, or it would leave the rest of a layer to the others each time that it was done first. Behind the
  // last phase it waits a little for the next round.
  static constexpr int kMostTurns = 100000, kMostTurnsBehind = 2000;

  // Round in the upper half, pieces left in the lower: one word, so that nobody takes a piece of another round.
  struct alignas(64) Counter {
    std::atomic<uint64_t> value{0};
  };

  // At least one: the last piece of a phase opens the next, also of a phase that has nothing to do.
  uint64_t num_pieces(const Phase& phase) const {
    return static_cast<uint64_t>(std::clamp<int64_t>(phase.num_items, 1, most_pieces()));
  }

  void open(size_t index, uint32_t round) {
    num_done_[index].value.store(0, std::memory_order_relaxed);
    for (int thread = 0; thread < num_threads_; ++thread) {
      const Share share = share_of(num_pieces((*phases_)[index]), thread);
      left_of(index, thread).store(static_cast<uint64_t>(round) << 32 | (share.end - share.begin), std::memory_order_relaxed);
    }
    opened_[index].value.store(round, std::memory_order_release);
  }

  bool is_open(size_t phase, uint32_t round) const {
    return phase < kMostPhases && opened_[phase].value.load(std::memory_order_acquire) == round;
  }

  // Pieces of a phase that a thread takes before all others. They lie side by side: what is fetched behind one of them is
  // wanted by the same core, which would otherwise begin anew with each.
  struct Share {
    uint64_t begin;
    uint64_t end;
  };

  Share share_of(uint64_t num_pieces, int thread) const {
    const uint64_t all = static_cast<uint64_t>(num_threads_), number = static_cast<uint64_t>(thread);
    return {num_pieces * number / all, num_pieces * (number + 1) / all};
  }

  std::atomic<uint64_t>& left_of(size_t phase, int thread) {
    return num_left_[phase * static_cast<size_t>(num_threads_) + static_cast<size_t>(thread)].value;
  }

  // Its own pieces first, then those of the others. False if none is left.
  bool take_piece(size_t phase, uint32_t round, int thread) {
    for (int i = 0; i < num_threads_; ++i) {
      const int owner = thread + i < num_threads_ ? thread + i : thread + i - num_threads_;
      if (take_piece_of(phase, round, owner, thread)) return true;
    }
    return false;
  }

  // Whoever holds a piece keeps the round alive: only then is `phases_` looked at.
  bool take_piece_of(size_t index, uint32_t round, int owner, int thread) {
    std::atomic<uint64_t>& num_left = left_of(index, owner);
    uint64_t left = num_left.load(std::memory_order_acquire);
    do {
      if (left >> 32 != round || static_cast<uint32_t>(left) == 0) return false;
    } while (!num_left.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel));
    const std::vector<Phase>& phases = *phases_;
    const Phase& phase = phases[index];
    const uint64_t all = num_pieces(phase);
    const int64_t count = static_cast<int64_t>(all);
    const int64_t piece = static_cast<int64_t>(share_of(all, owner).end - static_cast<uint32_t>(left));
    phase.work(phase.num_items * piece / count, phase.num_items * (piece + 1) / count, thread);
    const bool is_last_phase = index + 1 == phases.size();
    // The last one opens the next phase; after the last phase's last piece, `phases` may be gone.
    if (num_done_[index].value.fetch_add(1, std::memory_order_acq_rel) + 1 == all && !is_last_phase) {
      open(index + 1, round);
    }
    return true;
  }

  void help(int thread) {
    for (uint32_t seen = 0;;) {
      for (int spins = 0; spins < kSpins && round_.load(std::memory_order_acquire) == seen; ++spins) pause();
      while (round_.load(std::memory_order_acquire) == seen) round_.wait(seen, std::memory_order_acquire);
      if (is_over_) return;
      seen = round_.load(std::memory_order_acquire);
      size_t phase = 0;
      for (int spins = 0; round_.load(std::memory_order_acquire) == seen; ++spins) {
        const bool is_behind = phase >= num_phases_.load(std::memory_order_relaxed);
        if (spins >= kSpins + (is_behind ? kMostTurnsBehind : kMostTurns)) break;
        if (!is_open(phase, seen)) {
          rest(spins);
          continue;
        }
        while (take_piece(phase, seen, thread)) {
        }
        ++phase;
        spins = 0;
      }
    }
  }

  static void rest(int spins) {
    if (spins < kSpins) {
      pause();
    } else {
      sched_yield();  // somebody else needs this core, perhaps the thread that is waited for
    }
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const int num_threads_;
  const std::vector<Phase>* phases_ = nullptr;
  std::atomic<bool> is_over_{false};
  std::atomic<size_t> num_phases_{0};  // of the round
  alignas(64) std::atomic<uint32_t> round_{0};
  std::array<Counter, kMostPhases> opened_;  // round
  std::vector<Counter> num_left_;  // of each phase, and in it of each thread's share
  std::array<Counter, kMostPhases> num_done_;
  std::vector<std::thread> helpers_;
};

}  // namespace tokenyard
