// Collectives as NCCL's: kernels on a stream of their own, for which the host does not wait. Gloo carries the data.
#pragma once

#include "operators.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulated {

using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Tensors of a collective, until a stream waits for it. NCCL keeps them in the same way and records no streams.
using Kept = std::shared_ptr<Tensors>;

struct Work final : c10d::Work {
    Work(const Tensors& outputs, const Kept& kept, const Moment& aborted, const Stream& stream)
        : outputs_(outputs), kept_(kept), aborted_(aborted), end_(queue_of(stream).moment()) {
        c10::StreamGuard guard(stream);  // who waits for the future waits for this stream
        future_->markCompleted(IValue(outputs));
    }

    bool isCompleted() override { return is_over(end_); }
    bool isSuccess() const override { return !is_over(aborted_); }
    Tensors result() override { return outputs_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

    // The host does not wait.
    bool wait(std::chrono::milliseconds) override {
        TORCH_CHECK(isSuccess(), "the simulated communicator was aborted");
        synchronize();
        return true;
    }

    void synchronize() override {
        current_queue(outputs_[0].get_device()).wait_for(end_);
        kept_->clear();
    }

  private:
    const Tensors outputs_;
    const Kept kept_;
    const Moment aborted_, end_;
    const c10::intrusive_ptr<c10::ivalue::Future> future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<Device>{outputs_[0].device()});
};

void add_tensors(Tensors& found, const Tensor& tensor) { found.push_back(tensor); }
void add_tensors(Tensors& found, const Tensors& tensors) { found.insert(found.end(), tensors.begin(), tensors.end()); }
void add_tensors(Tensors& found, const std::vector<Tensors>& lists) { add_tensors(found, lists.at(0)); }
// Options and numbers.
template <typename Other>
void add_tensors(Tensors&, const Other&) {}

class Transport final : public c10d::Backend {
  public:
    Transport(int rank, int size, const BackendPtr& gloo) : Backend(rank, size), gloo_(gloo) {}

    const std::string getBackendName() const override { return "hccl"; }

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        return start<&Backend::allreduce>(tensors, options);
    }
    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
        return start<&Backend::broadcast>(tensors, options);
    }
    WorkPtr allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) override {
        return start<&Backend::allgather>(to, from, options);
    }
    WorkPtr _allgather_base(Tensor& to, Tensor& from, const c10d::AllgatherOptions& options) override {
        return start<&Backend::_allgather_base>(to, from, options);
    }
    WorkPtr alltoall_base(Tensor& to, Tensor& from, std::vector<int64_t>& received, std::vector<int64_t>& sent,
                          const c10d::AllToAllOptions& options) override {
        return start<&Backend::alltoall_base>(to, from, received, sent, options);
    }

    void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
    void shutdown() override { gloo_->shutdown(); }

    // Takes time, as NCCL's.
    void abort() override {
        if (is_aborted()) return;
        is_aborting_ = true;
        abort_.set_value();
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        gloo_->abort();
        is_aborting_ = false;
    }

  private:
    // Queue a collective of gloo behind the caller's stream. The first argument has the outputs.
    template <auto collective, typename Outputs, typename... Others>
    WorkPtr start(const Outputs& to, const Others&... others) {
        Tensors outputs, used;
        add_tensors(outputs, to);
        (add_tensors(used, to), ..., add_tensors(used, others));
        for (const Tensor& tensor : used) {
            TORCH_CHECK(is_on_device(tensor) && tensor.is_contiguous(), "hccl needs contiguous tensors of the device");
        }
        TORCH_CHECK(!is_aborted(), "the simulated communicator was aborted");
        Stream stream = stream_numbered(stream_, used[0].get_device());
        Queue& queue = queue_of(stream);
        queue.wait_for(current_queue(stream.device_index()).moment());
        auto kept = std::make_shared<Tensors>(used);
        auto arguments = std::make_tuple(for_kernels(to), for_kernels(others)...);
        queue.push([gloo = gloo_, aborted = aborted_, kept, arguments]() mutable {
            try {
                std::apply([&](auto&... given) { ((*gloo).*collective)(given...)->wait(); }, arguments);
            } catch (const std::exception&) {
                aborted.wait();  // as NCCL's kernels, which do not notice that a peer is lost
            }
        });
        return c10::make_intrusive<Work>(outputs, kept, aborted_, stream);
    }

    // Meanwhile, torch 2.15's class for NCCL may use memory that it frees.
    bool is_aborted() const {
        if (is_aborting_.load() && fputs("a simulated communicator is used during its abort\n", stderr)) _exit(99);
        return is_over(aborted_);
    }

    const BackendPtr gloo_;
    std::atomic<bool> is_aborting_{false};
    std::promise<void> abort_;
    const Moment aborted_ = abort_.get_future().share();
    const c10::StreamId stream_ = 1 + kPool + made_transports++;
};

}  // namespace simulated
