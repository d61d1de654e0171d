// Swap files: accounting, limits, space for all ranks, no name left behind, and stale files that are
// distinguished from those in use.
#include "offload/swap_file.h"

#include <gmock/gmock.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <vector>

#include "offload/swap_names.h"
#include "tests/offload/faulty_file_system.h"
#include "tests/offload/test_folder.h"
#include "tranche/core/error.h"

namespace tranche {
namespace {

using detail::IoCall;
using detail::owner_of_swap;
using detail::posix_file_system;
using detail::ProcessIdentity;
using detail::swap_name;
using detail::SwapFile;
using detail::SwapFileOptions;
using detail::this_process;
using ::testing::AllOf;
using testing::FaultyFileSystem;
using testing::FileOperation;
using ::testing::HasSubstr;
using testing::TestFolder;

template <typename Expected, typename Action>
Expected caught(Action action) {
  try {
    action();
  } catch (const Expected& error) {
    return error;
  }
  throw std::runtime_error("no error of the expected type");
}

class SwapFileTest : public ::testing::Test {
 protected:
  SwapFileOptions options() const {
    SwapFileOptions result;
    result.directory = folder_.path();
    result.rank = 3;
    return result;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      result.push_back(entry.path().filename());
    }
    return result;
  }
  TestFolder folder_;
  Ledger ledger_;
};

TEST_F(SwapFileTest, BooksRangesAndHoldsThem) {
  {
    SwapFile file(options(), posix_file_system(), ledger_);
    EXPECT_EQ(file.reserve(5000, Category::optimizer, "exp_avg"), 0);
    EXPECT_EQ(file.reserve(4096, Category::parameters, "master"), 8192);
    EXPECT_EQ(file.reserve(0, Category::other, "nothing"), 12288);
    EXPECT_EQ(file.bytes(), 12288);
    const TierAccount account = ledger_.account(Tier::nvme);
    EXPECT_EQ(account.current[Category::optimizer], 8192);
    EXPECT_EQ(account.current[Category::parameters], 4096);
    EXPECT_THAT(file.description(), HasSubstr("(not made yet)"));
    EXPECT_THAT(caught<LogicError>([&] { file.file(); }).message(), HasSubstr("call create() first"));
    file.check_space();
    file.create();
    EXPECT_THAT(names(), ::testing::IsEmpty()) << "it has no name";
    EXPECT_EQ(file.file().size(), 12288);
    const std::string text = "some bytes";
    file.file().write(8000, text.data(), 10);
    std::string back(10, ' ');
    file.file().read(8000, back.data(), 10);
    EXPECT_EQ(back, text);
    EXPECT_THAT(file.description(),
                HasSubstr("12.00 KiB in " + folder_.path() +
                          (file.file().direct() ? " (direct I/O)" : " (through the page cache: ")));
    EXPECT_THAT(caught<LogicError>([&] { file.reserve(1, Category::other, "late"); }).message(),
                HasSubstr("'late' reserves 1 B of the nvme tier, but its file has been made"));
    EXPECT_THROW(file.create(), LogicError);
    EXPECT_THROW(file.reserve(-1, Category::other, "x"), InvalidArgument);
  }
  EXPECT_EQ(ledger_.total(Tier::nvme), 0);
  EXPECT_EQ(ledger_.account(Tier::nvme).peak, 12288);
}

TEST_F(SwapFileTest, SimulatedKeepsBooksOnly) {
  FaultyFileSystem files(posix_file_system());
  SwapFileOptions simulated = options();
  simulated.simulated = true;
  simulated.directory = "/nowhere/at/all";
  SwapFile file(simulated, files, ledger_);
  file.reserve(std::int64_t{1} << 50, Category::optimizer, "states");
  file.check_space();
  file.create();
  EXPECT_EQ(ledger_.total(Tier::nvme), std::int64_t{1} << 50);
  EXPECT_THAT(file.description(), HasSubstr("(simulated)"));
  EXPECT_THAT(caught<LogicError>([&] { file.file(); }).message(), HasSubstr("simulated swap file"));
  EXPECT_THROW(file.reserve(1, Category::other, "late"), LogicError);
  for (int i = 0; i < testing::file_operation_count; ++i) {
    EXPECT_EQ(files.count(static_cast<FileOperation>(i)), 0);
  }
}

TEST_F(SwapFileTest, RefusesBeyondTheLimitBeforeBooking) {
  SwapFileOptions limited = options();
  limited.limit_bytes = 10'000;
  SwapFile file(limited, posix_file_system(), ledger_);
  file.reserve(4096, Category::optimizer, "first");
  ledger_.set_phase("start", "h.2");
  const auto error = caught<OutOfMemory>([&] { file.reserve(4097, Category::optimizer, "second"); });
  EXPECT_TRUE(error.of_budget());
  for (const char* text :
       {"start of h.2: 'second' (optimizer) asks for", "(4097 B) of nvme memory",
        "but the limit is 9.77 KiB (10000 B), of which", "(4096 B) are held", "raise the limit"}) {
    EXPECT_THAT(error.message(), HasSubstr(text));
  }
  EXPECT_EQ(ledger_.total(Tier::nvme), 4096);
  EXPECT_EQ(file.reserve(4096, Category::optimizer, "third"), 4096) << "what fits is taken afterwards";
}

TEST_F(SwapFileTest, RoomForAllRanksIsAskedBeforeAnythingIsWritten) {
  FaultyFileSystem files(posix_file_system());
  files.set_free_bytes(3 * 8192 - 1);
  SwapFileOptions shared = options();
  shared.ranks_on_node = 3;
  SwapFile file(shared, files, ledger_);
  file.reserve(8192, Category::optimizer, "states");
  const auto error = caught<OutOfMemory>([&] { file.check_space(); });
  EXPECT_FALSE(error.of_budget());
  for (const std::string& text :
       {std::string("the nvme tier of the 3 ranks of this node, 8.00 KiB each, needs"),
        std::string("(24576 B) in '") + folder_.path(), std::string("(24575 B) of"),
        std::string("use another folder")}) {
    EXPECT_THAT(error.message(), HasSubstr(text));
  }
  EXPECT_EQ(files.count(FileOperation::open), 0);
  // The other ranks have created theirs, so the free space is enough for one.
  files.set_free_bytes(8192);
  file.create();
}

TEST_F(SwapFileTest, ADiskThatFillsUpLeavesNothing) {
  FaultyFileSystem files(posix_file_system());
  SwapFile file(options(), files, ledger_);
  file.reserve(8192, Category::optimizer, "states");
  files.set_free_bytes(8191);
  EXPECT_THAT(caught<OutOfMemory>([&] { file.create(); }).message(),
              HasSubstr("the nvme tier of rank 3 needs 8.00 KiB (8192 B)"));
  files.set_free_bytes(8192);
  files.inject({.operation = FileOperation::preallocate, .code = ENOSPC});
  const auto full = caught<OutOfMemory>([&] { file.create(); });
  EXPECT_THAT(full.message(), HasSubstr("No space left on device"));
  EXPECT_THAT(full.message(), HasSubstr("keep part of the state in memory"));
  files.inject({.operation = FileOperation::preallocate, .code = EIO});
  EXPECT_EQ(caught<IoError>([&] { file.create(); }).code(), EIO);
  EXPECT_THAT(names(), ::testing::IsEmpty());
  file.create();
  EXPECT_EQ(file.file().size(), 8192);
}

TEST_F(SwapFileTest, NamesThatCannotBeRemoved) {
  FaultyFileSystem files(posix_file_system());
  SwapFile file(options(), files, ledger_);
  file.reserve(8192, Category::optimizer, "states");
  files.inject({.operation = FileOperation::remove, .code = EACCES});
  const auto error = caught<IoError>([&] { file.create(); });
  EXPECT_THAT(error.message(), HasSubstr("removal of '" + folder_.path() + "/tranche-swap-"));
  EXPECT_THAT(names(), ::testing::IsEmpty()) << "tried again once it was closed";
  // Another run removed it first.
  files.inject({.operation = FileOperation::remove, .code = ENOENT});
  file.create();
  EXPECT_EQ(file.file().size(), 8192);
}

TEST_F(SwapFileTest, FoldersHaveToBeThere) {
  SwapFileOptions other = options();
  const auto refusal = [&] {
    return caught<ConfigurationError>([&] { SwapFile(other, posix_file_system(), ledger_); }).message();
  };
  other.directory = folder_ / "not mounted";
  EXPECT_THAT(refusal(), AllOf(HasSubstr("'" + (folder_ / "not mounted") + "', is not there; make it"),
                               HasSubstr("offload_optimizer.nvme_path"), HasSubstr("--nvme-path")));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "not mounted"));
  other.directory = folder_ / "file";
  std::ofstream(folder_ / "file") << "x";
  EXPECT_THAT(refusal(), HasSubstr("'" + (folder_ / "file") + "', is a file"));
  other.simulated = true;
  EXPECT_NO_THROW(SwapFile(other, posix_file_system(), ledger_)) << "a plan needs none";
}

TEST_F(SwapFileTest, AFolderThatTakesNoFilesIsTheUsersToMend) {
  for (const int code : {EACCES, EROFS}) {
    FaultyFileSystem files(posix_file_system());
    SwapFile file(options(), files, ledger_);
    file.reserve(8192, Category::optimizer, "states");
    files.inject({.operation = FileOperation::open, .code = code});
    EXPECT_THAT(
        caught<ConfigurationError>([&] { file.create(); }).message(),
        AllOf(HasSubstr("the folder of the nvme tier, '" + folder_.path() + "', takes no file of this user"),
              HasSubstr("/tranche-swap-")));
    files.inject({.operation = FileOperation::open, .code = EIO});
    EXPECT_EQ(caught<IoError>([&] { file.create(); }).code(), EIO);
  }
}

TEST_F(SwapFileTest, WithoutDirectTransfers) {
  const auto files = detail::make_posix_file_system([](IoCall call, std::int64_t bytes) -> std::int64_t {
    return call == IoCall::open_direct ? -EINVAL : bytes;
  });
  SwapFile file(options(), *files, ledger_);
  file.reserve(4096, Category::optimizer, "states");
  file.create();
  EXPECT_THAT(file.description(), HasSubstr("(through the page cache: the file system of"));
  EXPECT_THAT(file.description(), HasSubstr("refuses direct I/O"));
}

TEST_F(SwapFileTest, OptionsAreChecked) {
  SwapFileOptions wrong = options();
  wrong.directory = "";
  EXPECT_THROW(SwapFile(wrong, posix_file_system(), ledger_), InvalidArgument);
  wrong = options();
  wrong.ranks_on_node = 0;
  EXPECT_THAT(caught<InvalidArgument>([&] { SwapFile(wrong, posix_file_system(), ledger_); }).message(),
              HasSubstr("0 ranks on the node"));
}

TEST(SwapNames, TellWhoMadeThem) {
  ProcessIdentity owner = this_process();
  EXPECT_EQ(owner.process, ::getpid());
  EXPECT_GT(owner.started, 0u);
  owner.node = "a-host-with-dashes.example.org";
  const std::string name = swap_name(owner, 12);
  EXPECT_EQ(owner_of_swap(name), owner);
  EXPECT_NE(swap_name(owner, 12), name) << "no two are the same";
  for (const char* other :
       {"tranche-swap-", "tranche-swap-host-1-2-3", "model.bin", "tranche-swap-h-zz-1-1-0-1",
        "tranche-swap-h-0123456789abcdef-12-34-x-56", "tranche-swap--0123456789abcdef-1-2-3-4",
        "tranche-swap-h-0123456789abcdef-1-2-3-4.bak"}) {
    EXPECT_FALSE(owner_of_swap(other).has_value()) << other;
  }
}

// Files of dead processes are removed. All others stay: those of living processes, of other nodes, and
// unrelated files.
TEST_F(SwapFileTest, StaleFilesAreRemovedAndNothingElse) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  const ProcessIdentity self = this_process();
  ProcessIdentity dead = self;
  dead.process = child;
  dead.started += 1;
  ::waitpid(child, nullptr, 0);
  ProcessIdentity reused = self;  // its number now belongs to another process, this one
  reused.started -= 1;
  ProcessIdentity parent = self;
  parent.process = ::getppid();
  ProcessIdentity elsewhere = dead;
  elsewhere.node += "2";
  ProcessIdentity earlier = dead;  // another boot, or another container
  earlier.kernel = "0123456789abcdef";
  std::vector<std::string> gone, stays;
  for (const auto& owner : {dead, reused, earlier}) gone.push_back(swap_name(owner, 0));
  for (const auto& owner : {self, elsewhere, earlier}) stays.push_back(swap_name(owner, 0));
  stays.push_back(swap_name(dead, 0).append(".bak"));
  stays.emplace_back("weights.bin");
  for (const auto& name : gone) std::ofstream(folder_ / name) << "x";
  for (const auto& name : stays) std::ofstream(folder_ / name) << "x";
  std::filesystem::create_directory(folder_ / swap_name(dead, 1));
  // A process in another PID namespace uses this file.
  const auto used = posix_file_system().open(folder_ / stays[2], detail::OpenMode::update);
  ASSERT_TRUE(detail::lock_swap(*used));

  SwapFile file(options(), posix_file_system(), ledger_);
  file.reserve(4096, Category::optimizer, "states");
  file.create();
  for (const auto& name : gone) EXPECT_FALSE(std::filesystem::exists(folder_ / name)) << name;
  for (const auto& name : stays) EXPECT_TRUE(std::filesystem::exists(folder_ / name)) << name;
  EXPECT_EQ(names().size(), stays.size() + 1);
}

// Many ranks of many runs in one folder: none opens another's file, and none loses its own.
TEST_F(SwapFileTest, SharedFolders) {
  std::vector<pid_t> children;
  for (int run = 0; run < 4; ++run) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (int i = 0; i < 50; ++i) {
        Ledger ledger;
        SwapFile file(options(), posix_file_system(), ledger);
        file.reserve(4096, Category::optimizer, "states");
        file.create();
        const int wrote = run * 1000 + i;
        file.file().write(0, &wrote, sizeof(wrote));
        int read = -1;
        file.file().read(0, &read, sizeof(read));
        if (read != wrote) ::_exit(1);
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_THAT(names(), ::testing::IsEmpty());
}

}  // namespace
}  // namespace tranche
