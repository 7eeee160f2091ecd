// Streams, each a queue of tasks and the thread that runs them in their order, and events.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <future>
#include <random>
#include <thread>

namespace simulated {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using Task = std::function<void()>;

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 4;

// Stream 0 is the default one. The next are a pool, whose streams are given out in turn, as CUDA's; then the
// transport's.
constexpr c10::StreamId kPool = 32;
enum Kind { kMain, kSide, kCollective, kKinds };

Stream stream_numbered(c10::StreamId id, DeviceIndex device) {
    return Stream(Stream::UNSAFE, Device(kType, device), id);
}
Kind kind_of(const Stream& stream) { return stream.id() == 0 ? kMain : stream.id() <= kPool ? kSide : kCollective; }

// The longest delay before a task in microseconds, for each kind of stream. Every third task has one.
std::array<std::atomic<int>, kKinds> longest_delays{};
std::atomic<int> seed_of_delays{0};
// Whether the process has used a device.
std::atomic<bool> is_started{false};
// Later kernels would use what the destructors of torch's libraries have freed.
std::atomic<bool> is_ending{false};

// A moment of a stream. It is over when the stream has done what was queued before.
using Moment = std::shared_future<void>;

bool is_over(const Moment& moment) { return moment.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

class Queue {
  public:
    explicit Queue(const Stream& stream) : kind_(kind_of(stream)), random_(seed_of_delays + stream.hash()) {
        std::thread([this] { run(); }).detach();
    }

    void push(Task task) {
        std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(task));
        changed_.notify_one();
    }

    Moment moment() {
        auto reached = std::make_shared<std::promise<void>>();
        push([reached] { reached->set_value(); });
        return reached->get_future().share();
    }

    void wait_for(const Moment& moment) {
        push([moment] { moment.wait(); });
    }

  private:
    // An error of a kernel ends the process.
    void run() {
        at::set_num_threads(1);
        at::AutoDispatchBelowADInplaceOrView guard;
        while (Task task = next()) {
            int longest = longest_delays[kind_];
            bool is_late = longest > 0 && random_() % 3 == 0;
            if (is_late) std::this_thread::sleep_for(std::chrono::microseconds(random_() % longest));
            task();
        }
    }

    Task next() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty() && !is_ending; });
        Task task = std::move(tasks_.front());
        tasks_.pop_front();
        return task;
    }

    const Kind kind_;
    std::mt19937 random_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Task> tasks_;
};

// The streams of all devices. Each gets its thread at its first use, since threads do not survive a fork.
std::mutex& queues_mutex = *new std::mutex;
auto& queues = *new std::unordered_map<Stream, Queue*>;
std::atomic<c10::StreamId> made_side_streams{0}, made_transports{0};

Queue& queue_of(const Stream& stream) {
    std::lock_guard lock(queues_mutex);
    is_started = true;
    Queue*& queue = queues[stream];
    if (queue == nullptr) queue = new Queue(stream);  // never deleted, since its thread does not end
    return *queue;
}

std::vector<Moment> moments_of(DeviceIndex device) {
    std::lock_guard lock(queues_mutex);
    std::vector<Moment> made;
    for (auto& [stream, queue] : queues) {
        if (stream.device_index() == device) made.push_back(queue->moment());
    }
    return made;
}

thread_local DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_ids{};

DeviceIndex or_current(DeviceIndex index) { return index < 0 ? current_device : index; }
Stream current_stream(DeviceIndex index) { return stream_numbered(current_ids[or_current(index)], or_current(index)); }
Queue& current_queue(DeviceIndex index) { return queue_of(current_stream(index)); }

// Kernels may need the interpreter, so the host does not hold it while it waits for them.
void wait_on_host(const Moment& moment) {
    std::optional<pybind11::gil_scoped_release> released;
    if (PyGILState_Check()) released.emplace();
    moment.wait();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static DeviceIndex exchange(DeviceIndex index) {
        TORCH_CHECK(index < kDevices, "there is no device ", static_cast<int>(index));
        return std::exchange(current_device, or_current(index));
    }

    c10::DeviceType type() const override { return kType; }
    DeviceIndex deviceCount() const noexcept override { return kDevices; }
    Device getDevice() const override { return Device(kType, current_device); }
    void setDevice(Device device) const override { exchange(device.index()); }
    void uncheckedSetDevice(Device device) const noexcept override { exchange(device.index()); }
    Device exchangeDevice(Device device) const override { return Device(kType, exchange(device.index())); }

    Stream getStream(Device device) const override { return current_stream(device.index()); }
    Stream getDefaultStream(Device device) const override { return stream_numbered(0, or_current(device.index())); }
    Stream getNewStream(Device device, int) const override {
        return stream_numbered(1 + made_side_streams++ % kPool, or_current(device.index()));
    }
    Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
    Stream exchangeStream(Stream stream) const override {
        return stream_numbered(std::exchange(current_ids[stream.device_index()], stream.id()), stream.device_index());
    }

    void synchronizeStream(const Stream& stream) const override { wait_on_host(queue_of(stream).moment()); }
    void synchronizeDevice(DeviceIndex index) const override {
        for (const Moment& moment : moments_of(or_current(index))) wait_on_host(moment);
    }

    // An event points to the moment that it recorded last.
    static const Moment& moment_of(void* event) { return *static_cast<Moment*>(event); }
    void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
        delete static_cast<Moment*>(std::exchange(*event, new Moment(queue_of(stream).moment())));
    }
    void block(void* event, const Stream& stream) const override { queue_of(stream).wait_for(moment_of(event)); }
    bool queryEvent(void* event) const override { return is_over(moment_of(event)); }
    void synchronizeEvent(void* event) const override { wait_on_host(moment_of(event)); }
    void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }

    void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override;
};

}  // namespace simulated
