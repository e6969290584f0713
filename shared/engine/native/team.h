// A team of threads that work on one job at a time. The threads live as long as the process.
//
// A waiting thread spins for a moment, then sleeps. If it only spun, it would take the CPU from the threads it waits for
// when more threads want to run than there are CPUs. (An OpenMP runtime spins for milliseconds.)
#pragma once

#include <pthread.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <thread>

constexpr int LOOKS = 2000;  // about 50 us of spinning

static inline void pause_a_moment() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

static inline void wait_while(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < LOOKS; i++) {
    if (word.load(std::memory_order_acquire) != old) return;
    pause_a_moment();
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

class Barrier {
 public:
  // Sets how many threads meet. No thread may be in `wait`, except those that are just leaving it.
  void expect(int threads) { threads_ = threads; }

  void wait() {
    uint32_t turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < threads_) return wait_while(turn_, turn);
    arrived_.store(0, std::memory_order_relaxed);
    turn_.store(turn + 1, std::memory_order_release);
    turn_.notify_all();
  }

 private:
  int threads_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> turn_{0};
};

// One of the threads that work on a job: its number, and how many there are.
struct Hand {
  int thread, threads;
  Barrier* barrier;

  void wait() const {
    if (threads > 1) barrier->wait();
  }

  // This thread's share of `count` items: from(count) .. to(count) - 1.
  int from(int count) const { return long(count) * thread / threads; }
  int to(int count) const { return long(count) * (thread + 1) / threads; }
};

class Team {
 public:
  // Calls work(Hand) in `threads` threads, including this one. Returns when all of them have returned. Concurrent calls
  // of `run` are executed one after the other.
  template <class Work>
  static void run(int threads, const Work& work) {
    if (threads <= 1) return work(Hand{0, 1, nullptr});
    Team& team = of_process();
    std::lock_guard<std::mutex> alone(team.busy_);
    team.start(threads, [](const void* what, Hand hand) { (*static_cast<const Work*>(what))(hand); }, &work);
  }

 private:
  typedef void (*Call)(const void*, Hand);

  struct Job {
    Call call;
    const void* what;
    Hand hand;
  };

  struct Member {
    alignas(64) std::atomic<uint32_t> turn{0};
    Job job;
  };

  // Never destroyed, since its threads may still run while the process exits. A forked child has none of these threads,
  // so it starts a new team.
  static Team& of_process() {
    static Team* team = [] {
      pthread_atfork(nullptr, nullptr, [] { team = new Team; });
      return new Team;
    }();
    return *team;
  }

  void start(int threads, Call call, const void* what) {
    while (int(members_.size()) < threads - 1) std::thread(serve, &members_.emplace_back()).detach();
    barrier_.expect(threads);
    for (int i = 1; i < threads; i++) {
      Member& member = members_[i - 1];
      member.job = {call, what, {i, threads, &barrier_}};
      member.turn.fetch_add(1, std::memory_order_release);
      member.turn.notify_one();
    }
    Hand hand{0, threads, &barrier_};
    call(what, hand);
    hand.wait();
  }

  static void serve(Member* member) {
    for (uint32_t turn = 0;; turn++) {
      wait_while(member->turn, turn);
      Job job = member->job;
      job.call(job.what, job.hand);
      job.hand.wait();
    }
  }

  std::mutex busy_;
  std::deque<Member> members_;
  Barrier barrier_;
};
