#include "engine/host_copies.h"

#include <utility>
#include <vector>

#include "tranche/core/error.h"

namespace tranche {

HostCopy::HostCopy(HostCopy&& other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      tag_(std::move(other.tag_)),
      device_(std::move(other.device_)),
      host_(std::move(other.host_)),
      out_(std::exchange(other.out_, {})),
      in_(std::exchange(other.in_, {})),
      coming_(std::exchange(other.coming_, false)) {}

HostCopy& HostCopy::operator=(HostCopy&& other) noexcept {
  if (this == &other) return *this;
  release();
  owner_ = std::exchange(other.owner_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  tag_ = std::move(other.tag_);
  device_ = std::move(other.device_);
  host_ = std::move(other.host_);
  out_ = std::exchange(other.out_, {});
  in_ = std::exchange(other.in_, {});
  coming_ = std::exchange(other.coming_, false);
  return *this;
}

void HostCopy::leave_device() noexcept {
  if (owner_ == nullptr || coming_ || !device_) return;
  // The memory is free after the copy and after the compute stream's present work. One event covers both if
  // the link waits for the compute stream, because later copies need that work anyway.
  Event after = out_;
  try {
    if (const Event used = owner_->compute_.record(); !used.query()) {
      owner_->link_.to_host_stream().wait(used);
      after = owner_->link_.to_host_stream().record();
    }
  } catch (...) {
    // Without an event the memory could be reused too early. A failed stream no longer reads it.
    try {
      owner_->compute_.synchronize();
    } catch (...) {
    }
  }
  device_.release(after);
}

void HostCopy::release() noexcept {
  if (coming_) {
    device_.release(in_);
    host_.release(in_);
  } else {
    leave_device();
    device_.release();  // for a buffer that was never sent
    host_.release(out_);
  }
  owner_ = nullptr;
  bytes_ = 0;
  coming_ = false;
  out_ = in_ = {};
}

HostCopies::HostCopies(detail::HostLink& link, Stream& compute, StepArena& device, MemoryResource& host,
                       Ledger& ledger, std::function<void(const Event&)> wait)
    : link_(link), compute_(compute), device_(device), arena_(host, ledger), wait_(std::move(wait)) {}

void HostCopies::begin_pass(std::string_view program, bool record, const Shape& shape) {
  arena_.begin(program, record, shape);
}

void HostCopies::end_pass() {
  if (arena_.active()) arena_.end();
}

HostCopy HostCopies::send(StepBuffer buffer, std::string_view tag) {
  if (!buffer) throw LogicError("send_to_host() of an empty buffer '" + std::string(tag) + "'");
  HostCopy copy;
  copy.owner_ = this;
  copy.bytes_ = buffer.bytes();
  copy.tag_ = tag;
  copy.host_ = arena_.acquire(buffer.bytes(), Category::activations, tag);
  std::vector<Event> ready = copy.host_.ready();
  ready.push_back(compute_.record());
  copy.out_ = link_.copy_to_host(copy.host_.data(), buffer.data(), buffer.bytes(), ready);
  copy.device_ = std::move(buffer);
  return copy;
}

HostCopy HostCopies::keep(StepBuffer buffer) {
  HostCopy copy;
  copy.bytes_ = buffer.bytes();
  copy.device_ = std::move(buffer);
  return copy;
}

void HostCopies::prefetch(HostCopy& copy) {
  if (copy.owner_ == nullptr || copy.device_ || !copy.host_) return;
  HostCopies& owner = *copy.owner_;
  StepBuffer target = owner.device_.acquire(copy.bytes_, Category::activations, copy.tag_);
  std::vector<Event> ready = target.ready();
  ready.push_back(copy.out_);
  copy.in_ = owner.link_.copy_from_host(target.data(), copy.host_.data(), copy.bytes_, ready);
  copy.device_ = std::move(target);
  copy.coming_ = true;
}

StepBuffer HostCopies::fetch(HostCopy copy) {
  if (!copy) throw LogicError("fetch_from_host() of an empty copy; what was sent can be fetched once");
  if (copy.owner_ == nullptr) {
    copy.bytes_ = 0;
    return std::move(copy.device_);
  }
  HostCopies& owner = *copy.owner_;
  if (!copy.device_) prefetch(copy);
  if (copy.coming_) {
    owner.wait_(copy.in_);
    copy.host_.release(copy.in_);
    copy.device_.used_on(owner.compute_);
  } else {
    owner.wait_(copy.out_);  // it never left the device; later writes must not disturb the copy
    copy.host_.release(copy.out_);
  }
  copy.coming_ = false;
  copy.owner_ = nullptr;
  return std::move(copy.device_);
}

}  // namespace tranche
