#pragma once
/// Lets the processes of a failing job end only when all of them have printed their errors.

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

namespace tranche::test {

/// Called after this rank has printed its error; returns when `count` ranks have, or after 20 seconds.
/// Otherwise mpirun would end processes that have not printed yet as soon as the first one has failed. The
/// folder for their notes is TRANCHE_TEST_ERRORS, which the script that starts the job makes for it.
inline void await_errors_of_ranks(int rank, int count) {
  const char* folder = std::getenv("TRANCHE_TEST_ERRORS");
  if (folder == nullptr) return;
  const std::filesystem::path notes = folder;
  std::ofstream(notes / std::to_string(rank)).flush();
  const auto there = [&] {
    return std::distance(std::filesystem::directory_iterator(notes), std::filesystem::directory_iterator());
  };
  for (int turn = 0; turn < 2000 && there() < count; ++turn) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // mpirun passes on what was printed
}

}  // namespace tranche::test
