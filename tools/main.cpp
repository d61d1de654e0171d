#include <csignal>
#include <iostream>

#include "tranche/tools/program.h"
#include "tranche/tools/terminal.h"

int main(int argc, char** argv) {
  // A file that grows beyond `ulimit -f` is an error of the write, with a text, and no end without one.
  std::signal(SIGXFSZ, SIG_IGN);
  const tranche::tools::Output output{std::cout, std::cerr, tranche::tools::people_watch_output()};
  try {
    return tranche::tools::run_program({argv + 1, argv + argc}, output);
  } catch (...) {
    // Only what no rank could be told of comes here: the launcher's world did not start.
    const tranche::tools::Failure failure = tranche::tools::describe(std::current_exception());
    std::cerr << "tranche: " << failure.text << std::endl;
    return failure.status;
  }
}
