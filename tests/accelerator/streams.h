// Streams and events: each stream is a queue of tasks and a thread that runs them in order.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace simulated {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using Task = std::function<void()>;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 4;
// As CUDA's pool: of more streams, some are the same.
constexpr size_t kSideStreams = 32;

enum Kind { kMain, kSide, kCollective, kKinds };

// The longest delay before a task in microseconds, for each kind of stream. Every third task has one.
inline std::array<std::atomic<int>, kKinds> longest_delays{};
inline std::atomic<int> seed{0};
// Set when the interpreter ends: kernels would use what the destructors of torch's libraries have freed.
inline std::atomic<bool> is_ending{false};
// Whether the process has used a device.
inline std::atomic<bool> is_started{false};

// The first error of a kernel. As on CUDA, whoever waits for the device later gets it.
class DeviceError {
  public:
    void set(const std::string& text) {
        std::lock_guard lock(mutex_);
        if (text_.empty()) {
            text_ = text;
        }
    }

    void raise() {
        std::lock_guard lock(mutex_);
        TORCH_CHECK(text_.empty(), "a kernel of the simulated accelerator failed: ", text_);
    }

  private:
    std::mutex mutex_;
    std::string text_;
};

inline DeviceError device_error;

// A moment in the work of a stream. It is over when the stream has done all that was queued before.
using Moment = std::shared_future<void>;

inline bool is_over(const Moment& moment) {
    return moment.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

class Queue {
  public:
    explicit Queue(Kind kind, unsigned number) : kind(kind), number_(number) {
        std::thread([this] { run(); }).detach();
    }

    void push(Task task) {
        {
            std::lock_guard lock(mutex_);
            tasks_.push_back(std::move(task));
        }
        changed_.notify_one();
    }

    Moment moment() {
        auto reached = std::make_shared<std::promise<void>>();
        push([reached] { reached->set_value(); });
        return reached->get_future().share();
    }

    void wait_for(Moment moment) {
        push([moment] { moment.wait(); });
    }

    bool is_idle() {
        std::lock_guard lock(mutex_);
        return tasks_.empty() && !is_busy_;
    }

    const Kind kind;

  private:
    void run() {
        at::set_num_threads(1);
        std::mt19937 random(seed + number_);
        while (Task task = next()) {
            if (int longest = longest_delays[kind]; longest > 0 && random() % 3 == 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(random() % longest));
            }
            try {
                at::AutoDispatchBelowADInplaceOrView guard;
                task();
            } catch (const std::exception& error) {
                device_error.set(error.what());
            }
        }
    }

    Task next() {
        std::unique_lock lock(mutex_);
        is_busy_ = false;
        changed_.wait(lock, [&] { return !tasks_.empty() && !is_ending; });
        Task task = std::move(tasks_.front());
        tasks_.pop_front();
        is_busy_ = true;
        return task;
    }

    const unsigned number_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Task> tasks_;
    bool is_busy_ = false;
};

// The streams of one device. The ID of a stream is its place in the list; the default stream is the first.
class Streams {
  public:
    explicit Streams(DeviceIndex device) : device_(device) { add(kMain); }

    Stream make(Kind kind) {
        std::lock_guard lock(mutex_);
        if (kind == kSide && side_.size() == kSideStreams) {
            return named(side_[next_side_++ % kSideStreams]);
        }
        Stream made = add(kind);
        if (kind == kSide) {
            side_.push_back(made.id());
        }
        return made;
    }

    Queue& queue(c10::StreamId id) {
        std::lock_guard lock(mutex_);
        return *queues_.at(id);
    }

    std::vector<Moment> moments() {
        std::lock_guard lock(mutex_);
        std::vector<Moment> made;
        for (Queue* queue : queues_) {
            made.push_back(queue->moment());
        }
        return made;
    }

  private:
    Stream named(c10::StreamId id) const { return Stream(Stream::UNSAFE, Device(kType, device_), id); }

    Stream add(Kind kind) {
        queues_.push_back(new Queue(kind, 1000 * device_ + queues_.size()));
        return named(queues_.size() - 1);
    }

    const DeviceIndex device_;
    std::mutex mutex_;
    std::vector<Queue*> queues_;
    std::vector<c10::StreamId> side_;
    size_t next_side_ = 0;
};

// Made at the first use, since threads do not survive a fork, and never deleted, since they never end.
inline Streams& streams_of(DeviceIndex device) {
    static std::vector<Streams*>* all = [] {
        auto made = new std::vector<Streams*>;
        for (DeviceIndex index = 0; index < kDevices; ++index) {
            made->push_back(new Streams(index));
        }
        return made;
    }();
    is_started = true;
    return *all->at(device);
}

inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, kDevices> current_ids{};

inline DeviceIndex or_current(DeviceIndex index) {
    return index < 0 ? current_device : index;
}

inline Stream current_stream(DeviceIndex index) {
    index = or_current(index);
    return Stream(Stream::UNSAFE, Device(kType, index), current_ids[index]);
}

inline Queue& queue_of(const Stream& stream) {
    return streams_of(stream.device_index()).queue(stream.id());
}

inline Queue& current_queue(DeviceIndex index) {
    return queue_of(current_stream(index));
}

// Kernels may need the interpreter, so nobody holds it while waiting for them.
inline void wait_on_host(const Moment& moment) {
    if (PyGILState_Check()) {
        pybind11::gil_scoped_release release;
        moment.wait();
    } else {
        moment.wait();
    }
    device_error.raise();
}

struct Event {
    std::mutex mutex;
    Moment moment;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static void set(DeviceIndex index) {
        TORCH_CHECK(index < kDevices, "there is no device ", static_cast<int>(index));
        current_device = or_current(index);
        is_started = true;
    }

    c10::DeviceType type() const override { return kType; }
    DeviceIndex deviceCount() const noexcept override { return kDevices; }
    Device getDevice() const override { return Device(kType, current_device); }
    void setDevice(Device device) const override { set(device.index()); }
    void uncheckedSetDevice(Device device) const noexcept override { current_device = or_current(device.index()); }

    Device exchangeDevice(Device device) const override {
        Device before = getDevice();
        set(device.index());
        return before;
    }

    Stream getStream(Device device) const override { return current_stream(device.index()); }
    Stream getDefaultStream(Device device) const override {
        return Stream(Stream::UNSAFE, Device(kType, or_current(device.index())), 0);
    }
    Stream getNewStream(Device device, int) const override {
        return streams_of(or_current(device.index())).make(kSide);
    }
    Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }

    Stream exchangeStream(Stream stream) const override {
        Stream before = current_stream(stream.device_index());
        current_ids[stream.device_index()] = stream.id();
        return before;
    }

    bool queryStream(const Stream& stream) const override { return queue_of(stream).is_idle(); }
    void synchronizeStream(const Stream& stream) const override { wait_on_host(queue_of(stream).moment()); }

    void synchronizeDevice(DeviceIndex index) const override {
        for (const Moment& moment : streams_of(or_current(index)).moments()) {
            wait_on_host(moment);
        }
    }

    void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
        if (*event == nullptr) {
            *event = new Event;
        }
        auto recorded = static_cast<Event*>(*event);
        std::lock_guard lock(recorded->mutex);
        recorded->moment = queue_of(stream).moment();
    }

    static Moment moment_of(void* event) {
        if (event == nullptr) {  // never recorded, so there is nothing to wait for
            std::promise<void> over;
            over.set_value();
            return over.get_future().share();
        }
        auto recorded = static_cast<Event*>(event);
        std::lock_guard lock(recorded->mutex);
        return recorded->moment;
    }

    void block(void* event, const Stream& stream) const override { queue_of(stream).wait_for(moment_of(event)); }
    bool queryEvent(void* event) const override { return is_over(moment_of(event)); }
    void synchronizeEvent(void* event) const override { wait_on_host(moment_of(event)); }
    void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

    void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override;
};

}  // namespace simulated
