#include "core/process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace tranche {
namespace {

using detail::is_running;
using detail::ProcessIdentity;
using detail::this_process;

TEST(Process, IsKnownByHostBootNumberAndStart) {
  const ProcessIdentity self = this_process();
  EXPECT_EQ(self.process, ::getpid());
  EXPECT_GT(self.started, 0u);
  EXPECT_EQ(self, this_process());
  EXPECT_TRUE(is_running(self));
  ProcessIdentity other = self;
  other.started += 1;
  EXPECT_FALSE(is_running(other)) << "another process has the number now";
  other = self;
  other.node += "x";
  EXPECT_FALSE(other.same_kernel(self));
  EXPECT_FALSE(is_running(other));
  other = self;
  other.kernel = "0123456789abcdef";
  EXPECT_FALSE(is_running(other));
  EXPECT_FALSE(is_running({}));
}

TEST(Process, TheDeadDoNotRunAlsoBeforeTheyAreBuried) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const ProcessIdentity self = this_process();
    const bool told = ::write(ready[1], &self.started, sizeof self.started) == sizeof self.started;
    ::_exit(told ? 0 : 1);
  }
  ProcessIdentity identity = this_process();
  identity.process = child;
  ASSERT_EQ(::read(ready[0], &identity.started, sizeof identity.started),
            static_cast<ssize_t>(sizeof identity.started));
  siginfo_t ended{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_FALSE(is_running(identity)) << "its status waits for its parent";
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(is_running(identity));
  ::close(ready[0]);
  ::close(ready[1]);
}

}  // namespace
}  // namespace tranche
