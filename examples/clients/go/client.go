package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "sluice-agent/sluicev1"
)

const (
	waitForOffer = 30 * time.Second  // how long the gateway waits for an episode before it answers that there is none
	leaseAnswer  = 120 * time.Second // how long a lease may take: a gateway holds it while the orchestrator restarts
	patience     = 60 * time.Second  // how long a call is repeated while no gateway answers
	sampling     = 10 * time.Minute  // how long a sample may take while all replicas are busy
	renewals     = 3                 // how often a lease is renewed within its time: two calls may be lost
	runEnded     = "RUN_ENDED"       // the gateway's reason when the run has no more episodes
)

// Agent leases the episodes of a run from a gateway, and plays them.
type Agent struct {
	connection *grpc.ClientConn
	calls      pb.EpisodeServiceClient
	run        string
	token      string
}

// NewAgent makes an agent of a run. It connects on the first call.
// tokenFile holds the token of a principal with the role agent, caFile the authority that signed the gateway's certificate; both may be empty.
func NewAgent(target, run, tokenFile, caFile string) (*Agent, error) {
	agent, secure := &Agent{run: "runs/" + run}, insecure.NewCredentials()
	if tokenFile != "" {
		token, err := os.ReadFile(tokenFile)
		if err != nil {
			return nil, fmt.Errorf("the token file cannot be read: %w", err)
		}
		agent.token = strings.TrimSpace(string(token))
	}
	if caFile != "" {
		fromFile, err := credentials.NewClientTLSFromFile(caFile, "")
		if err != nil {
			return nil, fmt.Errorf("the file of the authority cannot be read: %w", err)
		}
		secure = fromFile
	}
	connection, err := grpc.NewClient(target, grpc.WithTransportCredentials(secure))
	if err != nil {
		return nil, fmt.Errorf("%s is not the address of a gateway: %w", target, err)
	}
	agent.connection, agent.calls = connection, pb.NewEpisodeServiceClient(connection)
	return agent, nil
}

// Close closes the connection.
func (agent *Agent) Close() error { return agent.connection.Close() }

// Episode is one attempt at a task.
type Episode struct {
	Task    *pb.Task
	Opening *pb.Conversation        // messages to begin with and tools, where the environment gives them
	Opened  *pb.OpenEpisodeResponse // its name, and the session key and base URLs for clients of OpenAI's and Anthropic's libraries
	agent   *Agent
	settles string // the settling key, which is for the calls of this file alone: with it an agent could set its own reward
}

// Generate samples what the assistant says next. Send each reply back as it came: then its exact tokens are kept.
func (episode *Episode) Generate(ctx context.Context, messages []*pb.ChatMessage) (*pb.EpisodeGeneration, error) {
	request := &pb.EpisodeServiceGenerateRequest{
		EpisodeId: episode.Opened.EpisodeId,
		RequestId: newID(),
		Prompt:    &pb.EpisodeServiceGenerateRequest_Conversation{Conversation: &pb.Conversation{Messages: messages}},
	}
	answer, err := call(ctx, episode.agent, sampling, 0, episode.agent.calls.Generate, request)
	if err != nil {
		return nil, err
	}
	return answer.Generations[0], nil
}

// Reward records a reward of one generation, beside that of the episode.
func (episode *Episode) Reward(ctx context.Context, generationID string, reward float64) error {
	request := &pb.RecordRewardRequest{EpisodeId: episode.Opened.EpisodeId, Reward: reward, Target: &pb.RecordRewardRequest_GenerationId{GenerationId: generationID}}
	_, err := call(episode.settling(ctx), episode.agent, patience, 0, episode.agent.calls.RecordReward, request)
	return err
}

// settling returns the context of a call that rewards or ends the episode.
func (episode *Episode) settling(ctx context.Context) context.Context {
	if episode.settles == "" { // the orchestrator is of a release without settling keys
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "session-key", episode.settles)
}

// Run plays episodes until the run has ended, and returns how many were submitted. What is under way then is left.
// play returns the reward. If it fails, the episode is given up.
func (agent *Agent) Run(ctx context.Context, atATime int, play func(context.Context, *Episode) (float64, error)) (int, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var played atomic.Int64
	var workers sync.WaitGroup
	for range atATime {
		workers.Add(1)
		go func() {
			defer workers.Done()
			for ctx.Err() == nil {
				leased, err := agent.lease(ctx)
				if err != nil { // the first worker that fails has learned that the run ended, or cannot be reached
					stop(err)
					return
				}
				if agent.playOne(ctx, leased, play) {
					played.Add(1)
				}
			}
		}()
	}
	workers.Wait()
	if cause := context.Cause(ctx); reason(cause) != runEnded {
		return int(played.Load()), cause
	}
	return int(played.Load()), nil
}

func (agent *Agent) lease(ctx context.Context) (*pb.LeasedTask, error) {
	// A lease whose answer was lost is given again: the id stays the same.
	request := &pb.LeaseTasksRequest{Run: agent.run, RequestId: newID(), MaxTasks: 1, MaxEpisodes: 1, Wait: durationpb.New(waitForOffer)}
	for {
		answer, err := call(ctx, agent, patience, leaseAnswer, agent.calls.LeaseTasks, request)
		if err == nil {
			return answer.Tasks[0], nil
		}
		if status.Code(err) != codes.ResourceExhausted { // nothing was on offer
			return nil, err
		}
	}
}

// playOne plays one episode, and returns whether it was submitted.
func (agent *Agent) playOne(ctx context.Context, leased *pb.LeasedTask, play func(context.Context, *Episode) (float64, error)) bool {
	ctx, done := context.WithCancel(ctx)
	defer done()
	go agent.renew(ctx, leased)
	opened, err := call(ctx, agent, patience, 0, agent.calls.OpenEpisode, &pb.OpenEpisodeRequest{LeaseId: leased.LeaseId, RequestId: newID()})
	var episode *Episode
	if err == nil {
		episode = &Episode{Task: leased.Task, Opening: leased.Opening, Opened: opened, agent: agent, settles: opened.SettlingKey}
		opened.SettlingKey = ""
		var reward float64
		if reward, err = play(ctx, episode); err == nil {
			request := &pb.SubmitTrajectoryRequest{EpisodeId: opened.EpisodeId, Reward: &reward}
			_, err = call(episode.settling(ctx), agent, patience, 0, agent.calls.SubmitTrajectory, request)
		}
	}
	if err == nil || ctx.Err() != nil { // the run ended while it was played
		return err == nil
	}
	log.Printf("an episode of task %s is given up: %v", leased.Task.TaskId, err)
	if episode != nil {
		why := []rune(err.Error())
		request := &pb.AbandonEpisodeRequest{EpisodeId: opened.EpisodeId, Reason: string(why[:min(len(why), 128)])}
		_, _ = call(episode.settling(ctx), agent, patience, 0, agent.calls.AbandonEpisode, request) // its lease ends anyway
	}
	return false
}

// renew keeps a lease until its episode has ended.
func (agent *Agent) renew(ctx context.Context, leased *pb.LeasedTask) {
	ticks := time.NewTicker(leased.Lease.AsDuration() / renewals)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C: // a failure shows in what is done to the episode next
			_, _ = call(ctx, agent, patience, 0, agent.calls.RenewLease, &pb.RenewLeaseRequest{LeaseId: leased.LeaseId})
		}
	}
}

// call makes an idempotent call, again and again while no gateway answers or the gateway asks to wait.
// No attempt begins after within; each may take what is left of it, and atLeast.
func call[Request, Answer any](
	ctx context.Context, agent *Agent, within, atLeast time.Duration,
	method func(context.Context, Request, ...grpc.CallOption) (Answer, error), request Request,
) (Answer, error) {
	if agent.token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+agent.token)
	}
	until := time.Now().Add(within)
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 2*time.Second) {
		attempt, cancel := context.WithTimeout(ctx, max(time.Until(until), atLeast, 100*time.Millisecond))
		answer, err := method(attempt, request)
		cancel()
		wait, again := retryAfter(err)
		wait = max(wait, pause)
		if !again || time.Now().Add(wait).After(until) {
			return answer, err
		}
		select {
		case <-ctx.Done():
			return answer, ctx.Err()
		case <-time.After(wait):
		}
	}
}

// retryAfter returns whether a call that failed so may be repeated, and after which time.
func retryAfter(err error) (time.Duration, bool) {
	for _, detail := range status.Convert(err).Details() {
		if retry, found := detail.(*errdetails.RetryInfo); found {
			return retry.RetryDelay.AsDuration(), status.Code(err) == codes.ResourceExhausted || status.Code(err) == codes.Unavailable
		}
	}
	return 0, status.Code(err) == codes.Unavailable
}

// reason returns the name of an error for programs, as proto/sluice/v1/errors.proto has them; empty if the server gave none.
func reason(err error) string {
	var failed interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &failed) {
		return ""
	}
	for _, detail := range failed.GRPCStatus().Details() {
		if info, found := detail.(*errdetails.ErrorInfo); found {
			return info.Reason
		}
	}
	return ""
}

func newID() string {
	id := make([]byte, 16)
	_, _ = rand.Read(id) // it never fails
	return hex.EncodeToString(id)
}
