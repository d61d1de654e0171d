#include "tools/child.h"

#include <gmock/gmock.h>

#include <csignal>
#include <thread>

#include "core/clock.h"
#include "tests/tools/temporary.h"
#include "tools/node.h"
#include "tranche/core/error.h"

namespace tranche::tools {
namespace {

using test::TemporaryFolder;
using testing::HasSubstr;

ChildCommand shell(const TemporaryFolder& folder, const std::string& script) {
  ChildCommand command;
  command.arguments = {"/bin/sh", "-c", script};
  command.log = folder.path("log");
  return command;
}

TEST(Child, EndsWithItsStatusAndBothOutputsInTheLog) {
  const TemporaryFolder folder;
  training::StopSignals signals({SIGINT, SIGTERM});
  const ChildResult result = run_child(shell(folder, "echo out; echo err >&2; cat; exit 7"), signals);
  EXPECT_EQ(result.status, 7);
  EXPECT_FALSE(result.timed_out);
  EXPECT_EQ(result.stopped_by, 0);
  EXPECT_EQ(test::read_file(folder.path("log")), "out\nerr\n") << "and an empty standard input";
  EXPECT_EQ(run_child(shell(folder, "kill -KILL $$"), signals).status, 128 + SIGKILL);
}

TEST(Child, HasAStatusWhereSigchldIsIgnored) {
  const TemporaryFolder folder;
  training::StopSignals signals({SIGINT, SIGTERM});
  struct sigaction ignore {
  }, before{}, after{};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGCHLD, &ignore, &before);
  const ChildResult result = run_child(shell(folder, "exit 7"), signals);
  ::sigaction(SIGCHLD, &before, &after);
  EXPECT_EQ(result.status, 7);
  EXPECT_EQ(after.sa_handler, SIG_IGN) << "what was there is put back";
}

TEST(Child, GetsVariablesThatTheUserHasNotSet) {
  const TemporaryFolder folder;
  training::StopSignals signals({SIGINT, SIGTERM});
  ::setenv("TRANCHE_TEST_USERS", "kept", 1);
  ChildCommand command = shell(folder, "echo $TRANCHE_TEST_USERS $TRANCHE_TEST_OURS");
  command.environment = {{"TRANCHE_TEST_USERS", "ours"}, {"TRANCHE_TEST_OURS", "added"}};
  EXPECT_EQ(run_child(command, signals).status, 0);
  EXPECT_EQ(test::read_file(folder.path("log")), "kept added\n");
  ::unsetenv("TRANCHE_TEST_USERS");
}

TEST(Child, IsEndedWithAllItStartedWhenTimeIsUp) {
  const TemporaryFolder folder;
  training::StopSignals signals({SIGINT, SIGTERM});
  ChildCommand command = shell(folder, "sleep 60 & echo $!; wait");
  int ticks = 0;
  const ChildResult result = run_child(command, signals, [&](double) {
    ++ticks;
    // Time is up as soon as the shell has started its child.
    if (!test::read_file(command.log).empty()) command.timeout = 1e-9;
  });
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.status, 128 + SIGTERM);
  EXPECT_LT(result.seconds, 9) << "without waiting for SIGKILL";
  EXPECT_GE(ticks, 1);
  const pid_t grandchild = std::stoi(test::read_file(folder.path("log")));
  // Its own parent has ended. The process that inherits it collects its status, so it may exist for a while,
  // but has ended.
  for (int tries = 0; tries < 3000 && ::kill(grandchild, 0) == 0; ++tries) {
    if (test::read_file("/proc/" + std::to_string(grandchild) + "/stat").find(") Z") != std::string::npos)
      break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const std::string stat = test::read_file("/proc/" + std::to_string(grandchild) + "/stat");
  EXPECT_TRUE(stat.empty() || stat.find(") Z") != std::string::npos) << stat;
}

TEST(Child, IsEndedByASignalToThisProcess) {
  const TemporaryFolder folder;
  training::StopSignals signals({SIGINT, SIGTERM});
  bool sent = false;
  const ChildResult result = run_child(shell(folder, "exec sleep 60"), signals, [&](double) {
    if (!sent) ::kill(::getpid(), SIGTERM);
    sent = true;
  });
  EXPECT_EQ(result.stopped_by, SIGTERM);
  EXPECT_EQ(result.status, 128 + SIGTERM);
  EXPECT_EQ(signals.poll(), SIGTERM) << "and stays";
}

TEST(Child, IsEndedBeforeItHasBecomeTheProgram) {
  const TemporaryFolder folder;
  for (int i = 0; i < 20; ++i) {
    training::StopSignals signals({SIGINT, SIGTERM});
    ::raise(SIGTERM);  // the child receives it as soon as it exists
    const ChildResult result = run_child(shell(folder, "exec sleep 60"), signals);
    EXPECT_EQ(result.status, 128 + SIGTERM);
    ASSERT_LT(result.seconds, 9) << "without waiting for SIGKILL";
  }
}

TEST(Child, SaysWhyItCannotRun) {
  const TemporaryFolder folder;
  training::StopSignals signals({SIGINT, SIGTERM});
  ChildCommand command = shell(folder, "true");
  command.log = folder.path("none/log");
  EXPECT_THAT(test::message_of<IoError>([&] { run_child(command, signals); }),
              HasSubstr("none/log' cannot be written: No such file or directory"));
  command = shell(folder, "true");
  command.arguments = {folder.path("no-program")};
  EXPECT_EQ(run_child(command, signals).status, 127);
}

TEST(Child, ShellLineCanBePasted) {
  EXPECT_EQ(shell_line({"mpirun", "-n", "2", "--set", "a.b=1", "two words", "", "it's", "$HOME"}),
            R"(mpirun -n 2 --set a.b=1 'two words' '' 'it'\''s' '$HOME')");
}

TEST(Child, TailIsTheLastLines) {
  const TemporaryFolder folder;
  EXPECT_EQ(tail_of(folder.write("f", "1\n2\n3\n4\n\n"), 2), "3\n4");
  EXPECT_EQ(tail_of(folder.write("f", "1\n2"), 5), "1\n2");
  EXPECT_EQ(tail_of(folder.path("none"), 5), "");
  EXPECT_EQ(tail_of(folder.write("f", std::string(10000, 'x')), 5).size(), 4000u);
}

TEST(Host, IsDescribed) {
  const NodeDescription host = describe_node();
  EXPECT_GE(host.cores, 1);
  EXPECT_GT(host.memory_bytes, 1 << 20);
  EXPECT_THAT(host.system, HasSubstr("Linux"));
  EXPECT_FALSE(own_path().empty());
  EXPECT_EQ(find_command("sh").substr(find_command("sh").size() - 3), "/sh");
  EXPECT_EQ(find_command("no-such-command-at-all"), "");
  EXPECT_EQ(find_command("/bin/sh"), "/bin/sh");
  EXPECT_EQ(find_command("/etc/passwd"), "") << "no program";
  EXPECT_EQ(commit_at("/proc/1/no"), "");
  const TemporaryFolder folder;
  EXPECT_EQ(fingerprint_of(folder.write("f", "a")), "af63dc4c8601ec8c") << "FNV-1a's published value";
  EXPECT_EQ(fingerprint_of(folder.write("f", "")), "cbf29ce484222325");
  EXPECT_NE(fingerprint_of(folder.write("f", "ab")), fingerprint_of(folder.write("g", "ba")));
  EXPECT_EQ(fingerprint_of(folder.path("none")), "");
}

}  // namespace
}  // namespace tranche::tools
