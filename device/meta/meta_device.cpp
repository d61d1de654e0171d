#include "device/meta/meta_device.h"

#include <utility>

#include "device/work_recorder.h"
#include "tranche/core/error.h"
#include "tranche/device/memory_resources.h"

namespace tranche::detail {
namespace {

class MetaStream : public Stream {
 public:
  explicit MetaStream(std::string name) : name_(std::move(name)) {}
  /// With a recorder, work that would run inline is recorded in the host's row.
  MetaStream(std::string name, WorkRecorder* recorder, bool inline_work) : MetaStream(std::move(name)) {
    if (recorder == nullptr) return;
    set_recorder(recorder, inline_work ? WorkRecorder::host_lane : recorder->add_lane(name_));
  }
  DeviceKind kind() const override { return DeviceKind::meta; }
  const std::string& name() const override { return name_; }
  int threads() const override { return 1; }
  void enqueue(std::string_view, std::function<void()>) override {}
  // Never blocks, but rethrows a failure that is already known.
  void wait(const Event& event) override {
    if (recorder() != nullptr) recorder()->wait(lane(), event);
    if (event.query()) event.wait();
  }
  Event record() override { return recorder() == nullptr ? Event() : recorder()->point(lane()); }
  void synchronize() override { record().wait(); }

 private:
  std::string name_;
};

class MetaDevice : public Device {
 public:
  explicit MetaDevice(const DeviceOptions& options)
      : index_(options.index),
        recorder_(options.recorder),
        compute_("compute", recorder_.get(), recorder_ && recorder_->inline_compute()),
        device_memory_(make_meta_resource(Tier::device)),
        host_memory_(make_meta_resource(Tier::host)) {}

  DeviceKind kind() const override { return DeviceKind::meta; }
  int index() const override { return index_; }
  int threads() const override { return 1; }
  void set_threads(int) override {}
  std::string description() const override { return "meta"; }
  Stream& compute_stream() override { return compute_; }
  std::unique_ptr<Stream> create_stream(std::string name) override {
    return std::make_unique<MetaStream>(std::move(name), recorder_.get(), false);
  }
  std::unique_ptr<Stream> create_inline_stream(std::string name, int) override {
    return std::make_unique<MetaStream>(std::move(name));
  }
  std::unique_ptr<Stream> create_host_stream(std::string name, int) override {
    return std::make_unique<MetaStream>(std::move(name), recorder_.get(), false);
  }
  MemoryResource& memory(Tier tier) override {
    if (tier == Tier::device) return *device_memory_;
    if (tier == Tier::host) return *host_memory_;
    throw InvalidArgument("a device has no memory of tier nvme; the block store of offload/ holds it");
  }
  bool host_accessible() const override { return false; }
  void fill_bytes(Stream& stream, void*, unsigned char, std::int64_t bytes) override {
    record(stream, WorkKind::kernel, "fill bytes", bytes);
  }
  std::unique_ptr<Replay> create_replay(std::string) override { return std::make_unique<DirectReplay>(); }
  void copy_to_host(Stream& stream, void*, const void*, std::int64_t bytes) override {
    record(stream, WorkKind::copy_to_host, "copy to host", bytes);
  }
  void copy_from_host(Stream& stream, void*, const void*, std::int64_t bytes) override {
    record(stream, WorkKind::copy_from_host, "copy from host", bytes);
  }

 private:
  static void record(Stream& stream, WorkKind kind, const char* name, std::int64_t bytes) {
    if (bytes < 0) throw InvalidArgument("copy of " + std::to_string(bytes) + " bytes");
    if (stream.recorder() == nullptr || bytes == 0) return;
    RecordedWork work;
    work.kind = kind;
    work.name = name;
    if (kind != WorkKind::kernel) work.bytes_read = static_cast<double>(bytes);
    work.bytes_written = static_cast<double>(bytes);
    stream.recorder()->add(stream.lane(), std::move(work));
  }

  int index_;
  std::shared_ptr<WorkRecorder> recorder_;
  MetaStream compute_;
  std::unique_ptr<MemoryResource> device_memory_;
  std::unique_ptr<MemoryResource> host_memory_;
};

}  // namespace

std::unique_ptr<Device> make_meta_device(const DeviceOptions& options) {
  return std::make_unique<MetaDevice>(options);
}

}  // namespace tranche::detail
