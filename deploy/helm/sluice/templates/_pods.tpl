{{/*
The pod of a part. (dict "root" . "part" "rollout" "role" "rollout" "values" .Values.rollout "args" (list ...) "ports" (dict ...))

part: name of the part, its label.        role: the image.           values: what values.yaml says of it.
command: before `args`; default sluice.   args: words, settings and flags.
ports: numbers by name.                   state: where a disk of its own is mounted, "" for none.
dispatcher: whether it calls replicas or environments with the dispatcher's token.
principal: whose token it sends; "" for a part that calls nobody.
job: whether the pod is one of a Job, whose name says what it is made of.
*/}}
{{- define "sluice.pod" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $part := .values -}}
metadata:
  labels:
    {{- include "sluice.labels" . | nindent 4 }}
    {{- with merge dict ($part.labels | default dict) $values.pods.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    {{- if not .job }}
    checksum/settings: {{ include (print $root.Template.BasePath "/settings.yaml") $root | sha256sum }}
    {{- end }}
    {{- with merge dict ($part.annotations | default dict) $values.pods.annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "sluice.podSpec" . | nindent 2 }}
  # SIGTERM comes after preStop. Then the service drains, until nothing is left or drainSeconds are over, and gets a margin to end its
  # engine and its files.
  terminationGracePeriodSeconds: {{ add $values.pods.preStopSeconds $part.drainSeconds 30 }}
  {{- if and $values.model.prepare.command (has .role (list "trainer" "rollout")) }}
  initContainers:
    {{- include "sluice.waitForModel" . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "sluice.image" . | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: {{ .command | default (list "sluice") | toJson }}
      args:
        {{- toYaml .args | nindent 8 }}
      env:
        {{- include "sluice.env" . | nindent 8 }}
      ports:
        {{- range $name, $number := .ports }}
        - {name: {{ $name }}, containerPort: {{ $number }}}
        {{- end }}
        - {name: probe, containerPort: {{ $values.network.probePort }}}
        - {name: metrics, containerPort: {{ $values.network.metricsPort }}}
      # ServerInfoService is SERVING as long as the process lives: an engine that restarts, or a service that drains, is not killed.
      # sluice.ready is SERVING while the service has what it needs of others. Three parts are ready as soon as they answer their own
      # calls, since what they wait for comes through their Service, which leads to ready pods alone: an orchestrator calls the
      # trainer to begin an epoch, and finds replicas by their name before the first version is published; replicas announce
      # themselves to the orchestrator.
      startupProbe:
        grpc: {port: {{ $values.network.probePort }}, service: sluice.v1.ServerInfoService}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ max 1 (div $part.startSeconds 5) }}
      readinessProbe:
        {{- if has .part (list "trainer" "rollout" "orchestrator") }}
        grpc: {port: {{ $values.network.probePort }}}
        {{- else }}
        grpc: {port: {{ $values.network.probePort }}, service: sluice.ready}
        {{- end }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      livenessProbe:
        grpc: {port: {{ $values.network.probePort }}, service: sluice.v1.ServerInfoService}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      lifecycle:
        preStop:
          # Until nobody is sent here any more. SIGTERM follows, and drains: `sluice drain` would do the same.
          sleep: {seconds: {{ $values.pods.preStopSeconds }}}
      {{- include "sluice.resources" . | nindent 6 }}
      {{- include "sluice.containerSecurity" $root | nindent 6 }}
      volumeMounts:
        {{- include "sluice.mounts" . | nindent 8 }}
  volumes:
    {{- include "sluice.volumes" . | nindent 4 }}
{{- end }}

{{/* What all pods of this chart have in common. */}}
{{- define "sluice.podSpec" -}}
{{- $values := .root.Values -}}
{{- $part := .values -}}
serviceAccountName: {{ include "sluice.name" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $values.pods.userId }}
  runAsGroup: {{ $values.pods.userId }}
  fsGroup: {{ $values.pods.userId }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with merge dict ($part.nodeSelector | default dict) $values.pods.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat ($part.tolerations | default list) $values.pods.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $part.priorityClassName | default $values.pods.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "sluice.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "sluice.resources" -}}
{{- $part := .values -}}
{{- $given := $part.resources | default dict -}}
{{- $gpus := $part.gpus | default 0 | int -}}
{{- $limits := $given.limits | default dict -}}
{{- if $gpus }}{{ $limits = merge (dict ($part.gpuResource | default "nvidia.com/gpu") $gpus) $limits }}{{ end -}}
resources:
  {{- with $given.requests }}
  requests:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $limits }}
  limits:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- define "sluice.env" -}}
{{- $values := .root.Values -}}
- {name: HOME, value: /tmp}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if has .role (list "trainer" "rollout") }}
{{- with $values.model.hubTokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $value := merge dict (.values.env | default dict) $values.pods.env }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end }}

{{- define "sluice.mounts" -}}
{{- $values := .root.Values -}}
- {name: settings, mountPath: /etc/sluice, readOnly: true}
{{- if $values.run.files }}
- {name: files, mountPath: /etc/sluice/run, readOnly: true}
{{- end }}
- {name: secrets, mountPath: /run/sluice/secrets, readOnly: true}
{{- if ne $values.security.tls.mode "none" }}
- {name: tls, mountPath: /run/sluice/tls, readOnly: true}
{{- end }}
- {name: tmp, mountPath: /tmp}
- {name: state, mountPath: /run/sluice/outputs}
{{- if .values.sharedMemory }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if and (or $values.model.claim $values.model.prepare.command) (has .role (list "trainer" "rollout" "weightsync" "orchestrator")) }}
- {name: model, mountPath: /run/sluice/model, readOnly: true}
{{- end }}
{{- with concat (.values.extraVolumeMounts | default list) $values.pods.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "sluice.volumes" -}}
{{- $values := .root.Values -}}
{{- $name := include "sluice.name" .root -}}
- name: settings
  configMap: {name: {{ $name }}-settings}
{{- if $values.run.files }}
- name: files
  configMap: {name: {{ $name }}-files}
{{- end }}
- name: secrets
  projected:
    # 0440: the group of the pod reads them, nobody else.
    defaultMode: 0440
    sources:
      - secret:
          name: {{ $name }}-principals
      {{- if .principal }}
      - secret:
          name: {{ $name }}-token-{{ .principal }}
          items: [{key: token, path: own.token}]
      {{- end }}
      {{- if .dispatcher }}
      - secret:
          name: {{ $name }}-token-dispatcher
          items: [{key: token, path: dispatcher.token}]
      {{- end }}
{{- if ne $values.security.tls.mode "none" }}
- name: tls
  secret: {secretName: {{ include "sluice.tlsSecret" .root }}, defaultMode: 0440}
{{- end }}
- name: tmp
  emptyDir: {}
{{- if not .claimTemplate }}
- name: state
  {{- if .claim }}
  persistentVolumeClaim: {claimName: {{ .claim }}}
  {{- else if .values.storage }}
  emptyDir: {sizeLimit: {{ .values.storage.size }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- with .values.sharedMemory }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- if and (or $values.model.claim $values.model.prepare.command) (has .role (list "trainer" "rollout" "weightsync" "orchestrator")) }}
- name: model
  persistentVolumeClaim: {claimName: {{ $values.model.claim | default (print $name "-model") }}, readOnly: true}
{{- end }}
{{- with concat (.values.extraVolumes | default list) $values.pods.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Waits until the Job has prepared the model, and says what is missing when the time is over. */}}
{{- define "sluice.waitForModel" -}}
{{- $prepare := .root.Values.model.prepare -}}
- name: wait-for-model
  image: {{ include "sluice.image" . | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [sh, -c]
  args:
    - |
      left={{ $prepare.deadlineSeconds }}
      until [ -e /run/sluice/model/.ready ]; do
        if [ "$left" -le 0 ]; then
          echo "no model after {{ $prepare.deadlineSeconds }} s (model.prepare.deadlineSeconds): look at the log of job {{ include "sluice.prepareJob" .root }}" >&2
          exit 1
        fi
        left=$((left - 2))
        sleep 2
      done
  resources:
    requests: {cpu: 10m, memory: 16Mi}
  {{- include "sluice.containerSecurity" .root | nindent 2 }}
  volumeMounts:
    - {name: model, mountPath: /run/sluice/model, readOnly: true}
{{- end }}

{{- define "sluice.prepareJob" -}}
{{ include "sluice.name" . }}-model-{{ .Values.model.prepare | toJson | sha256sum | trunc 8 }}
{{- end }}

{{/* The words of settings that every service gets; what belongs to its principal comes as flags. */}}
{{- define "sluice.settings" -}}
- "@"
- /etc/sluice/run.toml
- "@"
- /etc/sluice/cluster.toml
{{- if .principal }}
- --security.token-file=/run/sluice/secrets/own.token
{{- end }}
{{- if .dispatcher }}
- --security.dispatcher-token-file=/run/sluice/secrets/dispatcher.token
{{- end }}
{{- with .flags }}
{{ toYaml . }}
{{- end }}
{{- with .values.flags }}
{{ toYaml . }}
{{- end }}
{{- end }}
