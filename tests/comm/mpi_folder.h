#pragma once
/// A folder that the ranks of a test under mpirun share.

#include <stdlib.h>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <string>
#include <system_error>

#include "mpi_main.h"

namespace tranche::test {

/// A new, empty folder, the same on all ranks of one node, which must have the same TMPDIR. The constructor
/// and the destructor are collective over all ranks. The destructor removes the folder, unless a rank has
/// failed.
class MpiFolder {
 public:
  MpiFolder() : path_((std::filesystem::temp_directory_path() / "tranche-mpi-test-XXXXXX").string()) {
    int error = 0;
    if (world().rank() == 0 && ::mkdtemp(path_.data()) == nullptr) error = errno;
    world().broadcast(&error, 1, DataType::int32, 0, {}, {"error", "folder", Traffic::control}).wait();
    if (error != 0) throw std::system_error(error, std::generic_category(), path_);
    world()
        .broadcast(path_.data(), static_cast<std::int64_t>(path_.size()), DataType::uint8, 0, {},
                   {"name", "folder", Traffic::control})
        .wait();
  }
  ~MpiFolder() {
    if (std::uncaught_exceptions() > unwinding_)
      return;  // the peers are elsewhere, and the error is told first
    try {
      world().barrier({"", "folder", Traffic::control}).wait();
    } catch (const std::exception&) {
      return;
    }
    std::error_code ignored;
    if (world().rank() == 0) std::filesystem::remove_all(path_, ignored);
  }
  MpiFolder(const MpiFolder&) = delete;
  MpiFolder& operator=(const MpiFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int unwinding_ = std::uncaught_exceptions();
};

}  // namespace tranche::test
