#pragma once
/// A model with all difficult kinds of tensors, and checkpoints of it by any number of ranks.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/format.h"
#include "checkpoint/reader.h"
#include "checkpoint/shard_writer.h"
#include "checkpoint/storage.h"
#include "tests/core/error_text.h"
#include "tranche/device/memory_resources.h"

namespace tranche::testing {

/// Storage on the test's file system, with one I/O thread (so that recorded operations have one order) and
/// process memory.
class TestStorage {
 public:
  explicit TestStorage(detail::FileSystem& files);
  operator checkpoint::Storage() const { return {files_, *io_, *memory_}; }

 private:
  detail::FileSystem& files_;
  std::unique_ptr<detail::BlockIo> io_;
  std::unique_ptr<MemoryResource> memory_;
};

/// Tensors of prime sizes, one with fewer elements than ranks, a tied one, frozen ones, and a unit that is
/// entirely frozen.
std::vector<checkpoint::UnitDescription> sample_units();
/// fp32 weights, bf16 frozen tensors; exp_avg in fp32 and exp_avg_sq in bf16.
checkpoint::Layout sample_layout(int world);
checkpoint::Layout sample_layout(const std::string& mesh, int ranks);
/// Four ranks, (shard 2) x (tensor 2): a fused projection split by heads into strided boxes, a projection
/// split by columns, tensors that all ranks hold whole, and a state in blocks of 4 elements and 6 bytes.
checkpoint::Layout boxed_layout();
/// The tensor's element at position `number` of a box.
std::int64_t element_of(const checkpoint::Box& box, const Shape& shape, std::int64_t number);
/// The value of a tensor's element in the dtype in which it is stored.
float sample_value(std::string_view kind, std::string_view tensor, std::int64_t element, DataType dtype,
                   int variant = 0);
/// A byte of a block of a tensor.
std::byte sample_byte(std::string_view kind, std::string_view tensor, std::int64_t block, std::int64_t byte,
                      int variant = 0);
/// The contents of a section of a rank's file, with zeros as padding.
std::vector<std::byte> sample_piece(const checkpoint::Layout& layout, const checkpoint::SectionPiece& piece,
                                    int variant = 0);
/// Reads every tensor of a checkpoint whole and expects the sample's values.
void expect_sample(checkpoint::Reader& reader, int variant = 0);
checkpoint::RunState sample_run(std::int64_t step);

/// A folder for tests of many small files: in memory if the system has such a folder, else in the build.
std::string fast_folder();

enum class Way { image, pieces };
/// Writes one rank's file.
checkpoint::ShardRecord write_sample_shard(checkpoint::Storage storage, const checkpoint::ShardPlan& plan,
                                           const std::string& folder, Way way, int variant = 0);
/// Runs all steps of a save by `world` ranks; returns the checkpoint's path.
std::string save_sample(checkpoint::Storage storage, const std::string& parent,
                        const checkpoint::Layout& layout, std::int64_t step, Way way = Way::image,
                        int variant = 0);
std::string save_sample(checkpoint::Storage storage, checkpoint::RunFolder& run,
                        const checkpoint::Layout& layout, std::int64_t step, Way way = Way::image,
                        int variant = 0, const std::string& user = {});

using test::message_of;

}  // namespace tranche::testing
