#include "comm/node/window_notes.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

namespace tranche::comm {

class WindowNotes::Sending : public Message {
 public:
  Sending(WindowNotes& notes, std::uint64_t number) : notes_(&notes), number_(number) {}
  bool test() override {
    notes_->flush();
    return number_ < notes_->sent_ - notes_->waiting_.size();
  }

 private:
  WindowNotes* notes_;
  std::uint64_t number_;
};

class WindowNotes::Receiving : public Message {
 public:
  Receiving(WindowNotes& notes, void* data, std::int64_t bytes, const Tag& tag)
      : notes_(&notes), data_(data), bytes_(bytes), tag_(tag) {}
  bool test() override { return notes_->take(data_, bytes_, tag_); }

 private:
  WindowNotes* notes_;
  void* data_;
  std::int64_t bytes_;
  Tag tag_;
};

void WindowNotes::flush() {
  bool pushed = false;
  while (!waiting_.empty()) {
    const NoteRing::Slot& first = waiting_.front();
    if (!out_->push(first.tag, first.data.data(), first.bytes)) break;
    waiting_.pop_front();
    pushed = true;
  }
  if (pushed) ring(*board_);
}

std::unique_ptr<Message> WindowNotes::send(const void* data, std::int64_t bytes, const Tag& tag) {
  if (bytes > NoteRing::largest) throw LogicError(fmt::format("a note of {} bytes", bytes));
  NoteRing::Slot note{};
  note.tag = tag;
  note.bytes = bytes;
  std::memcpy(note.data.data(), data, static_cast<std::size_t>(bytes));
  waiting_.push_back(note);
  const std::uint64_t number = sent_++;
  flush();
  return std::make_unique<Sending>(*this, number);
}

std::unique_ptr<Message> WindowNotes::receive(void* data, std::int64_t bytes, const Tag& tag) {
  return std::make_unique<Receiving>(*this, data, bytes, tag);
}

bool WindowNotes::take(void* data, std::int64_t bytes, const Tag& tag) {
  for (NoteRing::Slot note; in_->pop(note);) arrived_.push_back(note);
  const auto found = std::find_if(arrived_.begin(), arrived_.end(),
                                  [&](const NoteRing::Slot& note) { return note.tag == tag; });
  if (found == arrived_.end()) return false;
  const NoteRing::Slot note = *found;
  arrived_.erase(found);
  if (note.bytes != bytes) {
    throw CommunicationError(
        fmt::format("rank {} sent {} bytes where rank {} expects {}: the ranks' calls differ", peer_,
                    note.bytes, self_, bytes));
  }
  std::memcpy(data, note.data.data(), static_cast<std::size_t>(bytes));
  return true;
}

}  // namespace tranche::comm
