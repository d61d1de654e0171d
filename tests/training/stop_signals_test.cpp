#include "tranche/training/stop_signals.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <thread>

#include "tests/tools/temporary.h"
#include "tranche/core/error.h"

namespace tranche::training {
namespace {

/// Polls until there is a signal, for a minute at most, because one to the process may reach the main thread
/// through another thread.
int poll_for_a_while(StopSignals& signals) {
  for (int i = 0; i < 30'000; ++i) {
    if (const int signal = signals.poll(); signal != 0) return signal;
    ::usleep(2000);
  }
  return 0;
}

TEST(StopSignals, WaitUntilTheyAreAskedFor) {
  for (const int signal : StopSignals::signals) {
    StopSignals signals;
    EXPECT_EQ(signals.poll(), 0);
    ::raise(signal);
    EXPECT_EQ(signals.poll(), signal);
    EXPECT_EQ(signals.poll(), signal) << "stays";
  }
}

TEST(StopSignals, TheFirstCountsAndFurtherOnesEndNothing) {
  StopSignals signals;
  ::raise(SIGUSR1);
  EXPECT_EQ(signals.poll(), SIGUSR1);
  for (int i = 0; i < 3; ++i) {
    ::raise(SIGTERM);
    ::raise(SIGUSR1);
  }
  EXPECT_EQ(signals.poll(), SIGUSR1);
}

TEST(StopSignals, ThoseToTheProcessComeByAnyThread) {
  // A thread from before, which blocks no signals, as math libraries have.
  std::atomic<bool> end = false;
  std::thread thread([&] {
    while (!end) ::usleep(1000);
  });
  {
    StopSignals signals;
    ::kill(::getpid(), SIGTERM);
    EXPECT_EQ(poll_for_a_while(signals), SIGTERM);
  }
  end = true;
  thread.join();
}

TEST(StopSignals, PutsBackWhatWasThere) {
  struct sigaction before {
  }, after{};
  ::sigaction(SIGTERM, nullptr, &before);
  sigset_t blocked{};
  {
    StopSignals signals;
    ::raise(SIGTERM);  // never polled, so it is forgotten; otherwise this process would end here
    ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
    EXPECT_TRUE(::sigismember(&blocked, SIGTERM) == 1 && ::sigismember(&blocked, SIGUSR1) == 1);
  }
  ::sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
  ::pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  EXPECT_TRUE(::sigismember(&blocked, SIGTERM) == 0 && ::sigismember(&blocked, SIGUSR1) == 0);
}

TEST(StopSignals, EndAProcessThatDoesNotTakeThem) {
  const pid_t child = ::fork();
  if (child == 0) {
    { const StopSignals signals; }
    ::raise(SIGTERM);
    ::_exit(7);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
}

TEST(StopSignals, WhatTheParentHadIgnoredStaysIgnored) {
  for (const int ignored : {SIGHUP, SIGPIPE}) {
    struct sigaction ignore {
    }, before{}, during{};
    ignore.sa_handler = SIG_IGN;  // as nohup starts a program, or a service
    ::sigaction(ignored, &ignore, &before);
    {
      StopSignals signals;
      ::sigaction(ignored, nullptr, &during);
      ::raise(ignored);
      EXPECT_EQ(signals.poll(), 0);
      ::raise(SIGUSR2);
      EXPECT_EQ(signals.poll(), SIGUSR2) << "the others are taken all the same";
    }
    ::sigaction(ignored, &before, nullptr);
    EXPECT_EQ(during.sa_handler, SIG_IGN);
  }
}

TEST(StopSignals, AReaderThatIsGoneIsARequest) {
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  ::close(ends[0]);
  StopSignals signals;
  EXPECT_EQ(::write(ends[1], "x", 1), -1);
  EXPECT_EQ(signals.poll(), SIGPIPE);
  EXPECT_EQ(::write(ends[1], "x", 1), -1) << "the process lives on to save";
  ::close(ends[1]);
}

TEST(StopSignals, TheFirstInterruptIsARequest) {
  StopSignals signals;
  EXPECT_EQ(signals.poll(), 0);
  ::raise(SIGINT);
  EXPECT_EQ(signals.poll(), SIGINT) << "and not the signal that it waits as";
  EXPECT_EQ(signals.poll(), SIGINT) << "stays";
}

TEST(StopSignals, TheFirstInterruptToTheProcessComesByAnyThread) {
  std::atomic<bool> end = false;
  std::thread thread([&] {
    while (!end) ::usleep(1000);
  });
  {
    StopSignals signals;
    ::kill(::getpid(), SIGINT);
    EXPECT_EQ(poll_for_a_while(signals), SIGINT);
  }
  end = true;
  thread.join();
}

/// Runs `work` in a child that handles its signals; returns how the child ended.
int status_of_child(const std::function<void()>& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    work();
    ::_exit(7);
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

TEST(StopSignals, ASecondInterruptEndsTheProcessAtOnce) {
  for (const bool polled : {true, false}) {  // in a hang nothing polls for the first signal
    const int status = status_of_child([&] {
      StopSignals signals;
      ::raise(SIGINT);
      if (polled) (void)signals.poll();
      ::raise(SIGINT);
    });
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT) << status;
  }
}

TEST(StopSignals, AnInterruptEndsAProcessThatDoesNotTakeIt) {
  const int status = status_of_child([] {
    {
      StopSignals signals;
      ::raise(SIGINT);  // never polled, so it is forgotten
    }
    ::raise(SIGINT);
  });
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT) << status;
}

TEST(StopSignals, KeptUntilTheExitTheyEndNothingAnyMore) {
  const auto keep = [] {
    StopSignals signals;
    ::raise(SIGTERM);
    signals.keep_until_exit();
  };
  const int repeated = status_of_child([&] {
    keep();
    for (const int signal : StopSignals::signals) ::raise(signal);
    ::kill(::getpid(), SIGTERM);
    ::raise(SIGINT);
  });
  EXPECT_TRUE(WIFEXITED(repeated) && WEXITSTATUS(repeated) == 7) << repeated;
  const int interrupted = status_of_child([&] {
    keep();
    ::raise(SIGINT);
    ::raise(SIGINT);
  });
  EXPECT_TRUE(WIFSIGNALED(interrupted) && WTERMSIG(interrupted) == SIGINT) << interrupted;
}

TEST(StopSignals, AnIgnoredInterruptStaysIgnored) {
  const int status = status_of_child([] {
    ::signal(SIGINT, SIG_IGN);
    StopSignals signals;
    ::raise(SIGINT);
    ::raise(SIGINT);
    if (signals.poll() == 0) ::_exit(8);
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 8) << status;
}

TEST(StopSignals, OnlyTheMainThreadTakesThem) {
  std::string message;
  std::thread([&] {
    message = tools::test::message_of<LogicError>([] { const StopSignals signals; });
  }).join();
  EXPECT_THAT(message, testing::HasSubstr("main thread"));
}

TEST(StopSignals, HaveNames) {
  EXPECT_EQ(name_of_signal(SIGUSR1), "SIGUSR1");
  EXPECT_EQ(name_of_signal(SIGTERM), "SIGTERM");
  EXPECT_EQ(name_of_signal(0), "signal 0");
}

}  // namespace
}  // namespace tranche::training
