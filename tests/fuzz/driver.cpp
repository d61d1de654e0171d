// Runs a target without libFuzzer: replays inputs, or mutates seeds at random for some time.

#include <fcntl.h>
#include <getopt.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/mutator.h"

namespace tranche::fuzz {
namespace {

constexpr const char* usage = R"(fuzz_TARGET [options] [FILE ...]
  FILE ...          reads these inputs, and nothing else
  --executions N    damaged inputs to read (10000)
  --seconds S       ends after so many seconds, whatever has been read
  --seed N          other damage for each number (1)
  --limit S         an input that takes longer is a finding (5)
  --corpus FOLDER   writes the seeds and a dictionary for libFuzzer, and ends
  --list            prints the names of all targets, and ends
Exit status: 0 no finding, 1 a finding (its input is kept, and the line that repeats it printed), 2 usage.
)";

struct Arguments {
  std::int64_t executions = 10000, seed = 1, limit = 5;
  double seconds = 0;
  std::string corpus;
  bool list = false;
  std::vector<std::string> files;
};

Arguments parse(int argc, char** argv) {
  const option known[] = {{"executions", required_argument, nullptr, 'n'},
                          {"seconds", required_argument, nullptr, 's'},
                          {"seed", required_argument, nullptr, 'r'},
                          {"limit", required_argument, nullptr, 'l'},
                          {"corpus", required_argument, nullptr, 'c'},
                          {"list", no_argument, nullptr, 'a'},
                          {}};
  Arguments arguments;
  for (int letter = 0; (letter = ::getopt_long(argc, argv, "", known, nullptr)) != -1;) {
    if (letter == 'n') arguments.executions = std::atoll(optarg);
    if (letter == 's') arguments.seconds = std::atof(optarg);
    if (letter == 'r') arguments.seed = std::atoll(optarg);
    if (letter == 'l') arguments.limit = std::atoll(optarg);
    if (letter == 'c') arguments.corpus = optarg;
    if (letter == 'a') arguments.list = true;
    if (letter == '?') throw ConfigurationError(std::string("usage: ") + usage);
  }
  arguments.files.assign(argv + optind, argv + argc);
  return arguments;
}

/// The current input, stored in a file so that it remains if the process ends.
class Witness {
 public:
  explicit Witness(std::string path)
      : path_(std::move(path)), file_(::open(path_.c_str(), O_CREAT | O_RDWR | O_TRUNC | O_CLOEXEC, 0600)) {
    if (file_ < 0) throw ConfigurationError("cannot write " + path_ + ": " + std::strerror(errno));
  }
  ~Witness() { ::close(file_); }
  Witness(const Witness&) = delete;
  Witness& operator=(const Witness&) = delete;

  const std::string& path() const { return path_; }
  void keep(const std::string& input) const {
    if (::pwrite(file_, input.data(), input.size(), 0) != static_cast<ssize_t>(input.size()) ||
        ::ftruncate(file_, static_cast<off_t>(input.size())) != 0) {
      throw ConfigurationError("cannot write " + path_ + ": " + std::strerror(errno));
    }
  }

 private:
  std::string path_;
  int file_;
};

/// Reads seeds and mutated seeds until the end or until the process dies, also by the alarm's signal.
void attack(const Target& target, const Arguments& arguments, const Witness& witness) {
  const std::vector<std::string> seeds = target.seeds();
  const auto begin = std::chrono::steady_clock::now();
  const auto passed = [&begin] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const auto read = [&](const std::string& input) {
    witness.keep(input);
    ::alarm(static_cast<unsigned>(arguments.limit));
    return accepts(target, input);
  };
  std::int64_t accepted = 0, executions = 0;
  for (std::size_t i = 0; i < seeds.size(); ++i) {
    const bool taken = read(seeds[i]);
    if (i == 0) require(taken, "the first seed is refused: the format and its seeds have parted");
  }
  Mutator mutator(seeds, dictionary(target), static_cast<std::uint64_t>(arguments.seed));
  for (; executions < arguments.executions; ++executions) {
    if (arguments.seconds > 0 && passed() > arguments.seconds) break;
    if (read(mutator.next())) ++accepted;
  }
  ::alarm(0);
  const double seconds = passed();
  std::printf("fuzz_%s: %lld executions in %.1f s, %.0f a second, %lld accepted, no finding\n",
              std::string(target.name).c_str(), static_cast<long long>(executions), seconds,
              static_cast<double>(executions) / seconds, static_cast<long long>(accepted));
}

/// Runs attack() in a child process. Returns the exit status.
int supervise(const Target& target, const Arguments& arguments) {
  const std::string program = std::filesystem::absolute("fuzz_" + std::string(target.name)).string();
  const Witness witness(program + "." + std::to_string(::getpid()) + ".input");
  const pid_t child = ::fork();
  if (child < 0) throw ConfigurationError(std::string("cannot fork: ") + std::strerror(errno));
  if (child == 0) {
    try {
      attack(target, arguments, witness);
    } catch (const std::exception& problem) {
      std::fprintf(stderr, "%s\n", problem.what());
      std::exit(1);
    }
    std::exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
    std::filesystem::remove(witness.path());
    return 0;
  }
  const bool slow = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
  const std::string end = slow ? "took more than " + std::to_string(arguments.limit) + " s"
                          : WIFSIGNALED(status)
                              ? "ended it with signal " + std::to_string(WTERMSIG(status))
                              : "ended it with status " + std::to_string(WEXITSTATUS(status));
  std::fprintf(stderr, "fuzz_%s: finding: an input %s; again by\n  %s %s\n", std::string(target.name).c_str(),
               end.c_str(),
               std::filesystem::read_symlink("/proc/self/exe")
                   .parent_path()
                   .append("fuzz_" + std::string(target.name))
                   .c_str(),
               witness.path().c_str());
  return 1;
}

int run(int argc, char** argv) {
  const Arguments arguments = parse(argc, argv);
  if (arguments.list) {
    for (const Target& target : all_targets()) std::printf("%s\n", std::string(target.name).c_str());
    return 0;
  }
  const Target target = target_of(argv[0]);
  if (!arguments.corpus.empty()) {
    write_corpus(target, arguments.corpus);
    return 0;
  }
  if (arguments.files.empty()) return supervise(target, arguments);
  for (const std::string& path : arguments.files) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw ConfigurationError("cannot read " + path);
    const std::string input{std::istreambuf_iterator<char>(file), {}};
    ::alarm(static_cast<unsigned>(arguments.limit));
    std::printf("%s: %s\n", path.c_str(), accepts(target, input) ? "accepted" : "refused");
  }
  return 0;
}

}  // namespace
}  // namespace tranche::fuzz

int main(int argc, char** argv) {
  try {
    return tranche::fuzz::run(argc, argv);
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 2;
  }
}
