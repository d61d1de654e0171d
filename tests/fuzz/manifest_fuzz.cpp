// The text of a checkpoint's manifest after its digest, and everything that the program does with it before
// it reads values.

#include <algorithm>
#include <fstream>
#include <iterator>
#include <memory>

#include "checkpoint/folder.h"
#include "checkpoint/reader.h"
#include "config/changes.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/zero_checkpoint.h"
#include "tools/checkpoint/checkpoint_command.h"
#include "tools/checkpoint/checkpoint_source.h"
#include "tools/train/run_identity.h"
#include "tranche/config/config.h"
#include "tranche/device/memory_resources.h"

namespace tranche::fuzz {

namespace {

using namespace checkpoint;

/// Limits of reading: a sample is enough and keeps an execution short.
constexpr std::int64_t most_elements = 64, most_verified_bytes = 1 << 20;
constexpr std::size_t most_tensors = 16;

/// The staging memory of readers, kept between executions, because allocating 32 MiB each time would
/// dominate.
class KeptMemory : public MemoryResource {
 public:
  Tier tier() const override { return Tier::host; }
  void* allocate(const AllocationRequest& request) override {
    if (request.bytes > bytes_) kept_ = Buffer(*upstream_, bytes_ = request.bytes, request.category, "kept");
    return kept_.data();
  }
  void deallocate(void*, const AllocationRequest&) noexcept override {}

 private:
  std::unique_ptr<MemoryResource> upstream_ = make_host_resource(Tier::host);
  Buffer kept_;
  std::int64_t bytes_ = 0;
};

void read_values(Reader& reader) {
  std::vector<float> values(most_elements);
  for (std::size_t t = 0; t < std::min(reader.tensors().size(), most_tensors); ++t) {
    const StoredTensor& tensor = reader.tensors()[t];
    const std::int64_t elements = tensor.shape.elements(), part = std::min(elements, most_elements);
    for (const std::string& kind : reader.kinds(tensor)) {
      (void)reader.dtype(tensor, kind);
      reader.read_tensor(tensor.name, kind, {0, part}, DataType::float32, values.data());
      reader.read_tensor(tensor.name, kind, {elements - part, elements}, DataType::float32, values.data());
      require(values[0] == 0, "a value of a checkpoint of zeros is not zero");
    }
  }
  std::vector<std::byte> bytes(static_cast<std::size_t>(most_elements) * 8);
  for (const ArrayRecord& array : reader.layout().arrays) {
    (void)reader.array(array.name);
    const std::int64_t part = std::min(array.shape(0).elements(), most_elements);
    reader.read_array(array, 0, {0, part}, bytes.data());
  }
}

void read_manifest(std::string_view input) {
  const Manifest manifest = manifest_from_text(with_digest(input), "manifest.json");
  Manifest again = manifest_from_text(to_text(manifest), "again");
  again.version = manifest.version;  // the newest version is written
  again.minor = manifest.minor;
  require(again == manifest, "a manifest changes when it is written");
  (void)tools::format_time(manifest.created);
  (void)earlier_defaults(Config{}, manifest.run.config);
  (void)detail::configuration_changes(manifest.run.config, "{}");
  MemoryFiles files;
  for (auto& [name, content] : zero_checkpoint(manifest)) files.add("ck/" + name, std::move(content));
  static const auto io =
      detail::make_block_io({detail::BlockIoEngine::threads, std::int64_t{1} << 20, 1, {}});
  static KeptMemory memory;
  Reader reader({files, *io, memory}, "ck");
  read_values(reader);
  if (manifest.bytes() <= most_verified_bytes) (void)reader.verify();
  const tools::RunIdentity identity =
      tools::identity_of(manifest, "ck", "", models::ModelRegistry::with_builtin());
  tools::require_tensors(*identity.model, "its own 'user'", reader);
}

std::vector<std::string> manifest_seeds() {
  std::ifstream first(TRANCHE_FIRST_MANIFEST);  // a manifest of the first version
  const std::string text{std::istreambuf_iterator<char>(first), {}};
  return {without_digest(to_text(sample_manifest(1))), without_digest(to_text(sample_manifest(3))),
          without_digest(to_text(sample_manifest(1, true))), without_digest(text)};
}

}  // namespace

Target manifest_target() {
  return {"manifest", read_manifest, manifest_seeds, {ExitStatus::checkpoint}};
}

}  // namespace tranche::fuzz
